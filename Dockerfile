# genrl in a container: `docker build --target cpu -t genrl:cpu .` or `--target cuda`; `make docker-check` lints this file.
# The folder /work is the user's: docker run --rm -v "$PWD:/work" genrl:cpu train /genrl/configs/quickstart.yaml
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=PASSIVE
# git: the version of genrl is read from its tags, where there are some
# no versions: a release's packages are patched, and the older ones go away
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 genrl \
    && mkdir /work \
    && chown genrl /work
COPY . /genrl
WORKDIR /genrl

FROM base AS cpu
ARG TORCH=2.13.0
# PyTorch's index of wheels for CPUs (its installation page names it); without one, the wheel for GPUs comes, 3 GB more
ARG PIP_EXTRA_INDEX_URL=
RUN python -m pip install --constraint constraints.txt "torch==${TORCH}" \
    && python -m pip install --constraint constraints.txt '.[ocr,math]'
USER 1000
WORKDIR /work
ENTRYPOINT ["genrl"]
CMD ["--help"]

# torch's wheels bring CUDA themselves: the host needs its driver and the NVIDIA container toolkit (docker run --gpus all)
FROM base AS cuda
ARG TORCH=2.13.0
# gcc: Triton compiles its launchers by it. constraints.txt was made with the wheels for CPUs, so it is not used here.
# hadolint ignore=DL3008,DL3013
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && python -m pip install "torch==${TORCH}" \
    && python -m pip install '.[ocr,math,kernels,quantize,optim]'
USER 1000
WORKDIR /work
ENTRYPOINT ["genrl"]
CMD ["--help"]
