"""What this project uses of TorchRec's and FBGEMM's private API, in addition to the imports of this package.

It includes methods of public classes that our classes override or that must keep their parameters. The key of a class
is MODULE:CLASS. tests/unit/test_torchrec_private.py checks that the lists are complete, as far as types tell.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Used(NamedTuple):
    """What is used of a class."""

    methods: Mapping[str, str] = {}
    """name -> the parameters that we pass, or that an override of ours has"""
    attributes: str = ""
    """of instances, or of the class itself"""


_EMBEDDINGBAG, _EMBEDDING = "torchrec.distributed.embeddingbag", "torchrec.distributed.embedding"
_MC_EMBEDDINGBAG, _MC = "torchrec.distributed.mc_embeddingbag", "torchrec.distributed.mc_modules"
_MC_EMBEDDING = "torchrec.distributed.mc_embedding"
_TYPES, _KERNELS = "torchrec.distributed.embedding_types", "torchrec.distributed.batched_embedding_kernel"
_SHARDINGS, _LOOKUPS = "torchrec.distributed.sharding", "torchrec.distributed.embedding_lookup"
_DIST = "torchrec.distributed.embedding_sharding"
_COMMON, _TBE = (f"fbgemm_gpu.split_table_batched_embeddings_ops_{part}" for part in ("common", "training"))

_STEP = {
    "compute": "ctx dist_input",
    "compute_and_output_dist": "ctx input",
    "forward": "",
    "input_dist": "ctx features",
}
_SHARDED = "_device _env _lookups _optim module_sharding_plan post_lookup_tracker_fn post_odist_tracker_fn"
_SHARD = {"shard": "module params env device module_fqn"}
_SHARDER = "fused_params qcomm_codecs_registry sharded_module_type"
_SHARDING = Used(
    {"embedding_dims": "", "embedding_names": "", "feature_names": ""},
    "_grouped_embedding_configs_per_rank qcomm_codecs_registry",
)
_BY_NODE = Used(_SHARDING.methods, f"{_SHARDING.attributes} _local_size _world_size")
_OF_EVERY_RANK = Used(_SHARDING.methods, f"{_SHARDING.attributes} _grouped_embedding_configs")
_KERNEL = Used({}, "_config emb_module")

CLASSES = {
    # Sharders and sharded modules.
    f"{_EMBEDDINGBAG}:EmbeddingBagCollectionSharder": Used(
        {"__init__": "fused_params qcomm_codecs_registry sharded_module_order_overwrite", **_SHARD}, _SHARDER
    ),
    f"{_EMBEDDING}:EmbeddingCollectionSharder": Used(
        {"__init__": "fused_params qcomm_codecs_registry use_index_dedup", **_SHARD}, _SHARDER
    ),
    f"{_EMBEDDINGBAG}:ShardedEmbeddingBagCollection": Used(
        {
            "__init__": "module table_name_to_parameter_sharding env fused_params device qcomm_codecs_registry "
            "module_fqn sharded_module_order_overwrite",
            **_STEP,
            "_create_input_dist": "input_feature_names",
            "create_context": "",
            "create_embedding_bag_sharding": "sharding_infos env device",
            "create_grouped_sharding_infos": "module table_name_to_parameter_sharding prefix fused_params",
            "output_dist": "ctx output",
            "prefetch": "dist_input forward_stream ctx",
            "update_shards": "changed_sharding_params env device",
        },
        f"{_SHARDED} _embedding_bag_configs _embedding_dims _embedding_names _embedding_shardings _feature_splits "
        "_features_order _features_order_tensor _has_features_permute _has_mean_pooling_callback "
        "_has_uninitialized_input_dist _input_dists _is_weighted _module_fqn _output_dists "
        "_pooling_type_to_rs_features _sharding_types",
    ),
    f"{_EMBEDDING}:ShardedEmbeddingCollection": Used(
        {
            "__init__": "module table_name_to_parameter_sharding env fused_params device qcomm_codecs_registry "
            "use_index_dedup module_fqn",
            **_STEP,
            "create_embedding_sharding": "sharding_type sharding_infos env device",
            "create_grouped_sharding_infos": "module table_name_to_parameter_sharding fused_params",
        },
        f"{_SHARDED} _embedding_configs _embedding_names_per_sharding _need_indices _sharding_type_to_sharding",
    ),
    # Tables of any id.
    f"{_MC_EMBEDDINGBAG}:ManagedCollisionEmbeddingBagCollectionSharder": Used(
        {
            "__init__": "ebc_sharder mc_sharder qcomm_codecs_registry",
            "compute_kernels": "sharding_type compute_device_type",
            "sharding_types": "compute_device_type",
            **_SHARD,
        }
    ),
    f"{_MC_EMBEDDINGBAG}:ShardedManagedCollisionEmbeddingBagCollection": Used(
        {
            "__init__": "module table_name_to_parameter_sharding ebc_sharder mc_sharder env device",
            **_STEP,
            "_evict": "evictions_per_table",
            "output_dist": "ctx output",
        },
        "_device _embedding_module _env _managed_collision_collection _return_remapped_features",
    ),
    f"{_MC_EMBEDDING}:ManagedCollisionEmbeddingCollectionSharder": Used(
        {
            "__init__": "ec_sharder mc_sharder qcomm_codecs_registry",
            "compute_kernels": "sharding_type compute_device_type",
            "sharding_types": "compute_device_type",
            **_SHARD,
        }
    ),
    f"{_MC_EMBEDDING}:ShardedManagedCollisionEmbeddingCollection": Used(
        {
            "__init__": "module table_name_to_parameter_sharding ec_sharder mc_sharder env device",
            **_STEP,
            "output_dist": "ctx output",
        },
        "_device _embedding_module _env _managed_collision_collection _return_remapped_features",
    ),
    f"{_MC}:ManagedCollisionCollectionSharder": Used(
        {"__init__": "", "shard": "module params env device embedding_shardings"}
    ),
    f"{_MC}:ShardedManagedCollisionCollection": Used(
        {
            "__init__": "module table_name_to_parameter_sharding env device embedding_shardings",
            "_create_managed_collision_modules": "module",
            "compute": "ctx dist_input",
            "evict": "",
            "output_dist": "ctx output",
            "register_post_lookup_tracker_fn": "record_fn",
        },
        "_device _feature_to_table _managed_collision_modules _sharding_features _table_to_offset",
    ),
    "torchrec.modules.hash_mc_modules:HashZchManagedCollisionModule": Used(
        {
            "__init__": "zch_size device total_num_buckets max_probe output_segments name start_bucket end_bucket "
            "opt_in_prob percent_reserved_slots",
            "buckets": "",
            "get_reserved_slots_per_bucket": "",
            "output_size": "",
            "rebuild_with_output_id_range": "output_id_range output_segments device",
        },
        "METADATA_BUFFER _buckets _disable_fallback _eviction_config _eviction_policy_name _hash_zch_identities "
        "_hash_zch_metadata _max_probe _name _opt_in_prob _output_segments _tb_logging_frequency device",
    ),
    "torchrec.modules.mc_modules:MCHManagedCollisionModule": Used(
        {
            "_coalesce_history": "",
            "_init_history_buffers": "features",
            "input_size": "",
        },
        "_current_history_buffer_offset _current_iter _current_iter_tensor _eviction_interval _eviction_policy "
        "_history_accumulator _history_metadata _input_hash_func _input_history_buffer_size _last_eviction_iter "
        "_mch_remapped_ids_mapping _mch_sorted_raw_ids device",
    ),
    # What a step passes between their methods.
    f"{_EMBEDDINGBAG}:EmbeddingBagCollectionAwaitable": Used(
        {"__init__": "awaitables embedding_dims embedding_names module_fqn"}, "callbacks"
    ),
    f"{_EMBEDDINGBAG}:EmbeddingBagCollectionContext": Used(
        {"__init__": "sharding_contexts"}, "divisor inverse_indices sharding_contexts"
    ),
    f"{_DIST}:EmbeddingShardingContext": Used({"__init__": "batch_size_per_feature_pre_a2a"}, "batch_size_per_rank"),
    f"{_DIST}:FusedKJTListSplitsAwaitable": Used({"__init__": "requests contexts pg", "wait": ""}),
    f"{_DIST}:KJTListSplitsAwaitable": Used({"__init__": "awaitables ctx", "wait": ""}, "awaitables"),
    f"{_DIST}:KJTSplitsAllToAllMeta": Used({}, "pg"),
    f"{_TYPES}:KJTList": Used({"__getitem__": "key"}),
    "torchrec.distributed.types:LazyAwaitable": Used({"__init__": "", "_wait_impl": "", "wait": ""}, "callbacks"),
    "torchrec.sparse.jagged_tensor:KeyedJaggedTensor": Used(
        {
            "__init__": "keys values weights lengths offsets stride inverse_indices",
            "__getitem__": "key",
            "_key_indices": "",
            "permute": "indices indices_tensor",
            "split": "segments",
            "to": "device",
            "to_dict": "",
        },
        "_length_per_key",
    ),
    # Shardings, the groups of their tables, and the lookups of groups.
    f"{_SHARDINGS}.cw_sequence_sharding:CwSequenceEmbeddingSharding": _SHARDING,
    f"{_SHARDINGS}.cw_sharding:CwPooledEmbeddingSharding": Used(
        {"__init__": "sharding_infos env device", **_SHARDING.methods}, _SHARDING.attributes
    ),
    f"{_SHARDINGS}.dp_sequence_sharding:DpSequenceEmbeddingSharding": _OF_EVERY_RANK,
    f"{_SHARDINGS}.dp_sharding:DpPooledEmbeddingSharding": _OF_EVERY_RANK,
    f"{_SHARDINGS}.grid_sharding:GridPooledEmbeddingSharding": _BY_NODE,
    f"{_SHARDINGS}.rw_sequence_sharding:RwSequenceEmbeddingSharding": _SHARDING,
    f"{_SHARDINGS}.rw_sharding:RwPooledEmbeddingSharding": _SHARDING,
    f"{_SHARDINGS}.tw_sequence_sharding:TwSequenceEmbeddingSharding": _SHARDING,
    f"{_SHARDINGS}.tw_sharding:TwPooledEmbeddingSharding": Used(
        {"__init__": "sharding_infos env device", **_SHARDING.methods}, _SHARDING.attributes
    ),
    f"{_SHARDINGS}.twcw_sharding:TwCwPooledEmbeddingSharding": _SHARDING,
    f"{_SHARDINGS}.twrw_sharding:TwRwPooledEmbeddingSharding": _BY_NODE,
    f"{_TYPES}:GroupedEmbeddingConfig": Used(
        {}, "data_type embedding_tables fused_params has_feature_processor pooling"
    ),
    f"{_TYPES}:ShardedEmbeddingTable": Used(
        {}, "compute_kernel embedding_names feature_names local_cols local_metadata local_rows name pooling"
    ),
    f"{_TYPES}:EmbeddingComputeKernel": Used({}, "DENSE FUSED FUSED_UVM FUSED_UVM_CACHING"),
    f"{_LOOKUPS}:GroupedEmbeddingsLookup": Used({}, "_emb_modules"),
    f"{_LOOKUPS}:GroupedPooledEmbeddingsLookup": Used({}, "_emb_modules optim_state_tracker_fn"),
    f"{_KERNELS}:BatchedDenseEmbedding": _KERNEL,
    f"{_KERNELS}:BatchedDenseEmbeddingBag": _KERNEL,
    f"{_KERNELS}:BatchedFusedEmbedding": _KERNEL,
    f"{_KERNELS}:BatchedFusedEmbeddingBag": _KERNEL,
    f"{_KERNELS}:EmbeddingFusedOptimizer": Used({}, "_emb_module"),
    "fbgemm_gpu.quantize_comm:QuantizedCommCodec": Used({}, "_comm_precision _loss_scale"),
    f"{_TBE}:DenseTableBatchedEmbeddingBagsCodegen": Used({}, "embedding_specs weights weights_physical_offsets"),
    f"{_TBE}:ComputeDevice": Used({}, "CPU CUDA"),
    f"{_TBE}:CounterBasedRegularizationDefinition": Used({"__init__": ""}, "learning_rate_mode"),
    f"{_TBE}:UserEnabledConfigDefinition": Used({}, "use_rowwise_bias_correction use_writeback_bwd_prehook"),
    f"{_TBE}:WeightDecayMode": Used({}, "COUNTER DECOUPLE L2 NONE"),
    f"{_COMMON}:BoundsCheckMode": Used({}, "FATAL NONE WARNING"),
    f"{_COMMON}:EmbeddingLocation": Used({}, "DEVICE HOST"),
    f"{_COMMON}:PoolingMode": Used({}, "MEAN NONE SUM"),
    # Data-parallel tables and the dense part.
    "torchrec.distributed.composable.table_batched_embedding_slice:TableBatchedEmbeddingSlice": Used(
        {}, "_original_tensor _start_offset"
    ),
    "torchrec.modules.mlp:MLP": Used({}, "_mlp"),
    "torchrec.modules.mlp:Perceptron": Used({}, "_activation_fn _linear"),
    # Optimizers, pipelines, DDP.
    "torchrec.optim.clipping:GradientClippingOptimizer": Used({}, "_sharded_params"),
    "torchrec.optim.keyed:CombinedOptimizer": Used({"__init__": "optims"}, "optimizers state"),
    "torchrec.optim.keyed:KeyedOptimizerWrapper": Used({}, "_optimizer"),
    "torchrec.optim.keyed:OptimizerWrapper": Used({}, "_optimizer"),
    "torchrec.distributed.model_parallel:DistributedModelParallel": Used(
        {"init_data_parallel": ""}, "_ddp_wrapped _dmp_wrapped_module module"
    ),
    "torchrec.distributed.train_pipeline:TrainPipelineSparseDist": Used(
        {
            "__init__": "model optimizer device execute_all_batches custom_model_fwd "
            "dmp_collection_sync_interval_batches",
            "attach": "model sparse_dist",
            "detach": "",
            "progress": "dataloader_iter",
            "reset": "",
        },
        "_optimizer",
    ),
}

FUSED_LOOKUP = Used(
    {
        "__init__": "embedding_specs optimizer device bounds_check_mode weight_decay_mode counter_based_regularization "
        "output_dtype pooling_mode weights_precision",
        "forward": "indices offsets",
        "get_learning_rate": "",
        "prepare_inputs": "indices offsets",
        "split_embedding_weights": "",
        "split_optimizer_states": "",
    },
    "D_offsets bounds_check_mode_int current_device embedding_specs embedding_table_index_type "
    "enable_raw_embedding_streaming feature_table_map iter iter_cpu learning_rate_tensor lxu_cache_locations_empty "
    "lxu_cache_weights max_D optimizer optimizer_args output_dtype placeholder_autograd_tensor pooling_mode "
    "stochastic_rounding total_D use_cpu use_uniq_cache_locations_bwd use_writeback_bwd_prehook weight_decay_mode "
    "weights_dev weights_host weights_offsets weights_physical_offsets weights_placements weights_precision "
    "weights_uvm",
)
"""of `SplitTableBatchedEmbeddingBagsCodegen`, which stores most attributes under names that it computes"""
OPTIMIZER_ARGS = (
    "adjustment_iter adjustment_ub beta1 beta2 counter_halflife eps gradient_clipping learning_rate_mode max_gradient "
    "max_norm use_rowwise_bias_correction weight_decay weight_decay_mode"
)

OPERATORS = {
    "get_infos_metadata": "unused B T",
    "permute_1D_sparse_data": "permute lengths values weights",
    "permute_2D_sparse_data": "permute lengths values weights permuted_lengths_sum",
    "segment_sum_csr": "batch_size csr_seg values",
    "transpose_embedding_input": "hash_size_cumsum total_hash_size_bits indices offsets nobag info_B_num_bits "
    "info_B_mask",
}
"""FBGEMM's operators -> the arguments that we pass; `fbgemm` has the operators of the backward"""
