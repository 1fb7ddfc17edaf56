# Three images of one program:
#   server    no compiler; the default target:  docker build -t snapcap .
#   compiled  no torch module, for artifacts:   docker build -t snapcap-compiled --target compiled .
#   builder   with g++, for `snapcap build`:    docker build -t snapcap-builder --target builder .
# On NVIDIA GPUs, all with --build-arg TORCH_BACKEND=cu130. deploy/container/README.md has the rest.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# ── What is installed, in layers that change less and less often ────────────────────────────────────────────────
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS packages
# cpu, cu130, …: a name of PyTorch's wheel indexes, which uv knows; "index": whatever pip is configured to use.
ARG TORCH_BACKEND=cpu
ENV PATH=/opt/snapcap/bin:$PATH \
    VIRTUAL_ENV=/opt/snapcap \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_COMPILE=1
WORKDIR /src
RUN python -m venv /opt/snapcap
COPY constraints.txt ./
RUN if [ "$TORCH_BACKEND" != index ]; then \
        python -m venv /tmp/uv \
        && /tmp/uv/bin/pip install -c constraints.txt uv \
        && /tmp/uv/bin/uv pip install --no-cache --no-deps --torch-backend "$TORCH_BACKEND" -c constraints.txt torch \
        && rm -rf /tmp/uv; \
    fi \
    && pip install -c constraints.txt torch
COPY pyproject.toml ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt
COPY LICENSE README.md ./
COPY models models
COPY warmup warmup
COPY service service
COPY benchmarks benchmarks
COPY snapcap snapcap
# The build backend is there already: torch requires setuptools.
RUN pip install --no-deps --no-build-isolation . \
    && rm -rf /opt/snapcap/lib/python3.*/site-packages/torch/test \
    && find /opt/snapcap/lib/python3.*/site-packages/torch/bin -type f ! -name torch_shm_manager -delete

# What only compilers read is left out of the one, and with CUDA, whose libraries are there, added to the other.
# Byte code is not compared with its source at each import: nobody may write here later, and dates may be rewritten.
FROM packages AS server-packages
RUN rm -rf /opt/snapcap/lib/python3.*/site-packages/torch/include /opt/snapcap/lib/python3.*/site-packages/torch/share \
    && pip uninstall -y pip \
    && python -m compileall -q -j 0 --invalidation-mode unchecked-hash -x /py312_ /opt/snapcap/lib

# What a start from artifacts and prepared weights never loads: torch's Python module, and all that only it requires.
FROM server-packages AS compiled-packages
COPY deploy/container/compiled_only.py /src/
RUN python /src/compiled_only.py /opt/snapcap

FROM packages AS builder-packages
RUN if pip show -q cuda-toolkit; then \
        pip install -c constraints.txt 'cuda-toolkit[cccl,crt]' \
        && ln -s "$(echo /opt/snapcap/lib/python3.*/site-packages/nvidia/cu*)" /opt/snapcap/cuda; \
    fi \
    && pip uninstall -y pip \
    && python -m compileall -q -j 0 --invalidation-mode unchecked-hash -x /py312_ /opt/snapcap/lib

# ── What all images run on ──────────────────────────────────────────────────────────────────────────────────────
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="snapcap" \
      org.opencontainers.image.description="Image-captioning server that starts compiled" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.2.0"
# Python's own images come without byte code, and a read-only container would compile the same modules at each start.
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash \
        "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" -x '/(test|site-packages|dist-packages|lib2to3)/' \
    && groupadd --gid 65532 snapcap \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /var/cache/snapcap --shell /usr/sbin/nologin snapcap \
    && install -d -o 65532 -g 65532 /var/cache/snapcap
# The folders that must be writable are two: /var/cache/snapcap and /tmp, from which packages are loaded (no `noexec`).
ENV PATH=/opt/snapcap/bin:$PATH \
    HOME=/var/cache/snapcap \
    HF_HOME=/var/cache/snapcap/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    SNAPCAP_CACHE_DIR=/var/cache/snapcap
WORKDIR /var/cache/snapcap
EXPOSE 8000
# By number, which Kubernetes can check against runAsNonRoot.
USER 65532:65532
ENTRYPOINT ["snapcap"]

FROM runtime AS builder
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s /opt/snapcap/cuda /usr/local/cuda  # where torch looks for CUDA; leads nowhere without
COPY --from=builder-packages /opt/snapcap /opt/snapcap
USER 65532:65532
CMD ["build"]

FROM runtime AS compiled
COPY --from=compiled-packages /opt/snapcap /opt/snapcap
# Where an artifact or the prepared weights are missing, the server ends with one line that says so.
ENV SNAPCAP_BUILD=off
CMD ["serve"]

FROM runtime AS server
COPY --from=server-packages /opt/snapcap /opt/snapcap
# This image has no compiler: without artifacts the server stays eager, and the line `no artifacts` of its log names the
# command that compiles (`remedy`).
ENV SNAPCAP_BUILD=off
# PID 1 is the HTTP process, which waits for its children, the engine process and the parent of those that decode:
# no init is needed.
CMD ["serve"]
# No HEALTHCHECK: Kubernetes ignores it and asks /livez and /readyz itself; it would start a Python every few seconds.
