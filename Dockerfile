# genrl in a container: `docker build --target cpu -t genrl:cpu .` or `--target cuda`; `make docker-check` lints this file.
# The folder /work is the user's: docker run --rm -v "$PWD:/work" genrl:cpu train /genrl/configs/quickstart.yaml
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=PASSIVE
# git: the version of genrl is read from its tags, where there are some
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
RUN python -m pip install --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu "torch==${TORCH}+cpu" \
    && python -m pip install --constraint constraints.txt '.[ocr,math]'
USER genrl
WORKDIR /work
ENTRYPOINT ["genrl"]
CMD ["--help"]

# torch's wheels bring CUDA themselves: the host needs its driver and the NVIDIA container toolkit (docker run --gpus all)
FROM base AS cuda
ARG TORCH=2.13.0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && python -m pip install "torch==${TORCH}" \
    && python -m pip install '.[ocr,math,kernels,quantize,optim]'
USER genrl
WORKDIR /work
ENTRYPOINT ["genrl"]
CMD ["--help"]
