"""The embedding stage, from the plan of the tables to the update of their rows.

before a run   plan, balance          which rank holds which shard
               sharder                the drop-in: TorchRec's sharders with this exchange
               configured_sharders    the sharders of a configuration
               unsupported            what stays with TorchRec, and why
a module       exchanging_module      common base of the next two: which shards are exchanged, who sends ids
               sharded_module         pooled tables
               sharded_unpooled       unpooled tables
               torchrec_tables        tables that stay with TorchRec in captured steps
               variable_batch         features with fewer bags than samples
an exchange    exchange, opening      ids, forward and backward of a step, and the parts of an exchange
               unpooled, distinct     an exchange of distinct ids
               backends               the parts
its values     layout, shardings      the shards of all ranks, from TorchRec's shardings
               gradient_layout        where gradients arrive
               id_layout              where ids arrive
               tables, cache          this rank's rows, and the caches of those in host memory
               fbgemm_update          FBGEMM's update of the rows
               replicated             data-parallel tables
               windows, internode     windows that peers store into, and messages between nodes
               options, steps         state that is kept from step to step, and state of one step
"""

from importlib.util import find_spec

if not all(map(find_spec, ("torch", "fbgemm_gpu", "torchrec"))):
    from dlrm_overlap.launching.supported_versions import check_stack

    check_stack()  # raises, with the command that installs the missing one
