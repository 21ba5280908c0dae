"""The embedding stage, from the plan of the tables to the update of their rows.

before a run   plan, balance          which rank holds which shard
               sharder                TorchRec's sharders with our exchange, and their arguments
               reasons                what an exchange cannot take, which stays with TorchRec
a module       exchanging_module      what the next two share: which shards are exchanged, who sends ids
               sharded_module         a pooled collection
               sharded_unpooled       an unpooled one
               stock, own_batches     tables that stay with TorchRec beside captured steps; features' own batches
an exchange    exchange, opening      a step's ids, forward and backward, and the parts that it opens
               unpooled, distinct     the same of slots, which are made of the distinct ids of a batch
               backends               the parts
its values     layout, shardings      the shards of all ranks, and how TorchRec's become these
               tables, cache          this rank's rows, and those in the host's memory
               replicated             data-parallel tables
               options, steps         what stays from step to step, and what does not
"""

from importlib.util import find_spec

if not all(map(find_spec, ("torch", "fbgemm_gpu", "torchrec"))):
    from dlrm_overlap.launching.supported_versions import check_stack

    check_stack()  # raises, with the command that installs the missing one
