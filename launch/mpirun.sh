#!/usr/bin/env bash
# Train under mpirun, Open MPI's or MPICH's: one process a GPU (two processes where there is no GPU). Needs mpi4py.
#
#   launch/mpirun.sh configs/quickstart.yaml [--train.steps 200 ...]
#
# On several nodes:
#   NPROC=16 OMP_NUM_THREADS=8 MPIRUN_FLAGS="--hostfile nodes" launch/mpirun.sh configs/quickstart.yaml
#
# NPROC         processes in all
# MPIRUN_FLAGS  more options of mpirun
set -euo pipefail
if [ -z "${1:-}" ]; then echo "usage: launch/mpirun.sh CONFIG [--section.key value ...]" >&2; exit 2; fi
config=$1
shift
# The environment that `make` sets up beside this folder, unless another is active; on several nodes, at the same path.
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
if [ -n "${VIRTUAL_ENV:-}" ] || [ ! -x "$python" ]; then python=python; fi
# No yaml.py or torch.py of the working folder is run; a checkout that is not installed is named instead.
export PYTHONSAFEPATH=1
"$python" -c 'import dlrm_overlap' >/dev/null 2>&1 || export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
nproc=${NPROC:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')}
cores=$(( $(nproc) / nproc ))
threads=${OMP_NUM_THREADS:-$(( cores > 0 ? cores : 1 ))}

# Bound to one core each, as Open MPI does unasked, a rank's loaders and threads would share it. Variables go
# through `env`, since Open MPI passes none on to other nodes. MPIRUN_FLAGS is split into words on purpose.
exec mpirun -n "$nproc" --bind-to none ${MPIRUN_FLAGS:-} env OMP_NUM_THREADS="$threads" \
  PYTHONSAFEPATH=1 ${PYTHONPATH:+"PYTHONPATH=$PYTHONPATH"} \
  "$python" -m dlrm_overlap train --config "$config" "$@"
