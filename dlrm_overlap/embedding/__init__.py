"""The embedding stage, from the plan of the tables to the update of their rows.

before a run   plan, balance          which rank holds which shard
               sharder                TorchRec's sharders with this exchange, the drop-in
               configured_sharders    the same from a configuration
               unsupported            why tables stay with TorchRec
a module       exchanging_module      which shards are exchanged, who sends ids
               sharded_module         pooled tables
               sharded_unpooled       unpooled tables
               torchrec_tables        tables that stay with TorchRec
               variable_batch         features with fewer bags than samples
an exchange    exchange, opening      the order of a step; windows and parts
               unpooled, distinct     distinct ids of unpooled tables
               backends               the parts
its values     layout, shardings      the shards of all ranks
               gradient_layout        where gradients arrive
               id_layout              where ids arrive
               tables, cache          this rank's rows
               row_marks              which of them updates have changed
               fbgemm_update          FBGEMM's update
               replicated             data-parallel tables
               windows, internode     memory that peers store into; messages between nodes
               options, steps         state of an exchange, state of a step
"""

from importlib.util import find_spec

from dlrm_overlap.launching.supported_versions import TORCHREC_IMPORTS, check_releases, check_stack

if all(map(find_spec, ("torch", "fbgemm_gpu", "torchrec", *TORCHREC_IMPORTS.values()))):
    check_releases()
else:
    check_stack()  # raises, with the command that installs the missing one
