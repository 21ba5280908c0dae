#!/usr/bin/env bash
# Train under mpirun (Open MPI or MPICH): one process per GPU, or two without a GPU. Needs mpi4py.
#
#   launch/mpirun.sh configs/quickstart.yaml [--train.steps 200 ...]
#
# On several nodes:
#   NPROC=16 OMP_NUM_THREADS=8 MPIRUN_FLAGS="--hostfile nodes" launch/mpirun.sh configs/quickstart.yaml
#
# NPROC         total number of processes
# MPIRUN_FLAGS  further options of mpirun
set -euo pipefail
if [ -z "${1:-}" ]; then echo "usage: launch/mpirun.sh CONFIG [--section.key value ...]" >&2; exit 2; fi
config=$1
shift
# The active virtual environment, else the checkout's .venv (on several nodes, at the same path).
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
cores=$(( $(nproc) / nproc ))
threads=${OMP_NUM_THREADS:-$(( cores > 0 ? cores : 1 ))}

# By default Open MPI binds a rank, with its loaders and threads, to one core. Variables are set by `env`, since Open
# MPI does not forward them to other nodes. MPIRUN_FLAGS is split into words on purpose.
exec mpirun -n "$nproc" --bind-to none ${MPIRUN_FLAGS:-} env OMP_NUM_THREADS="$threads" \
  PYTHONSAFEPATH=1 ${PYTHONPATH:+"PYTHONPATH=$PYTHONPATH"} \
  "$python" -m dlrm_overlap train --config "$config" "$@"
