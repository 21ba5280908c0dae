# The CUDA stack, for training on NVIDIA GPUs (driver 580 or later).
#
#   make wheel && docker build -t dlrm-overlap .
#   docker run --rm --gpus all dlrm-overlap doctor
#   mkdir -p runs  # otherwise docker creates it as root
#   docker run --rm --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD/runs:/app/runs" \
#     dlrm-overlap train --config quickstart --nproc auto
#   docker run --rm --network host -v "$PWD/runs:/app/runs" --entrypoint sh \
#     dlrm-overlap -c 'tensorboard --host "$TENSORBOARD_HOST" --logdir runs'
#
# TensorBoard has no login, so it listens on the loopback address; -e TENSORBOARD_HOST=0.0.0.0 changes that.
#
# Another base image: --build-arg BASE=..., Debian or Ubuntu with Python 3.11 to 3.13. torch installs CUDA's libraries.
# Other versions of the libraries: --build-arg STACK=cuda-2-11, an extra of docs/torchrec.md; by default the newest.
ARG BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04
FROM $BASE

# Triton needs a C compiler and Python's headers to compile kernel launchers at run time. mpi4py uses Open MPI.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      gcc libc6-dev openmpi-bin openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /app
ARG STACK=cuda
COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir "$(echo /tmp/*.whl)[$STACK,data,mpi]" \
    && useradd --create-home dlrm && install -d -o dlrm -g dlrm runs

# A user name and a writable cache for `docker run --user` with an unknown id.
ENV USER=dlrm TRITON_CACHE_DIR=/tmp/triton TENSORBOARD_HOST=127.0.0.1 PYTHONUNBUFFERED=1
USER dlrm
ENTRYPOINT ["dlrm-overlap"]
CMD ["doctor"]
