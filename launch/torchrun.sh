#!/usr/bin/env bash
# Train under torchrun: one agent per node, one process per GPU, or two without a GPU.
#
#   launch/torchrun.sh configs/quickstart.yaml [--train.steps 200 ...]
#
# On several nodes, the same command on each, with NODE_RANK 0, 1, ..:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh configs/quickstart.yaml
#
# NPROC         processes on this node
# MAX_RESTARTS  how often a failed run restarts from its newest checkpoint (default 0; one node)
set -euo pipefail
if [ -z "${1:-}" ]; then echo "usage: launch/torchrun.sh CONFIG [--section.key value ...]" >&2; exit 2; fi
config=$1
shift
if [[ ! ${NNODES:-1} =~ ^[1-9][0-9]*$ ]]; then
  echo "NNODES: $NNODES is not a number of nodes; give one from 1 on, or unset it" >&2
  exit 2
fi
# The active virtual environment, else the checkout's .venv.
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
if [ -n "${VIRTUAL_ENV:-}" ] || [ ! -x "$python" ]; then python=python; fi
# Import nothing from the working folder. If the package is not installed, import it from this checkout.
export PYTHONSAFEPATH=1
"$python" -c 'import dlrm_overlap' >/dev/null 2>&1 || export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
nproc=${NPROC:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')}
if [[ ! $nproc =~ ^[1-9][0-9]*$ ]]; then
  echo "NPROC: $nproc is not a number of processes; give one from 1 on, or unset it" >&2
  exit 2
fi
# By default torchrun gives every process one thread.
cores=$(( $(nproc) / nproc ))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cores > 0 ? cores : 1 ))}
# Otherwise the ranks use the agent's store, which listens on all interfaces.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# By default SIGUSR1 ends torchrun alone, and the ranks train on without it.
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
if (( ${NNODES:-1} == 1 )); then
  nodes=(--standalone)
else
  nodes=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?set NODE_RANK, 0 on the node MASTER_ADDR}"
         --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the node of NODE_RANK 0}" --master-port "${MASTER_PORT:-29500}")
fi
exec "$python" -m torch.distributed.run "${nodes[@]}" --nproc-per-node "$nproc" --max-restarts "${MAX_RESTARTS:-0}" \
  -m dlrm_overlap train --config "$config" "$@"
