# hotkv-server and the `hotkv` command.
#   docker build -t hotkv .                               VARIANT=cuda12 or cuda13 adds CuPy, for nodes with GPUs
#   install -d -o 10001 -g 10001 -m 0700 /dev/shm/hotkv   for the arena, which outlives the container: the next container continues with it
#   install -d -o 10001 -g 10001 -m 0755 /run/hotkv       for the sockets; engines' containers mount this directory at the same path
#   docker run --rm -v /dev/shm/hotkv:/dev/shm/hotkv -v /run/hotkv:/run/hotkv --ulimit memlock=-1 --stop-timeout 50 hotkv run --arena.bytes 8GiB
# --stop-timeout: at a stop the server waits for transfers in flight; without the option Docker kills it after 10 s.
# For engines on GPUs add --gpus all --pid=host --ipc=host, and --pid=host --ipc=host for engines' containers (docs/cuda.md).
# Another user than 10001 needs these two directories as its own, and group 0 for the compiled kernels: --user 1000680000:0, as on OpenShift.
# Settings are flags, HOTKV_ variables, or a mounted file (run --config FILE).

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG VARIANT=cpu
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY sparse sparse
COPY client client
COPY server server
COPY connector_vllm connector_vllm
RUN case "$VARIANT" in \
      cpu) extras=server,events,s3,otel ;; \
      cuda12|cuda13) extras="server,events,s3,otel,$VARIANT" ;; \
      *) echo "VARIANT is $VARIANT; allowed are cpu, cuda12 and cuda13" >&2; exit 1 ;; \
    esac \
 && python -m venv /opt/hotkv \
 && /opt/hotkv/bin/pip install --no-cache-dir ".[$extras]"
# Compiles the kernels for this machine's kind of processor. On another kind, the first start compiles them again.
ENV NUMBA_CACHE_DIR=/var/cache/hotkv
RUN /opt/hotkv/bin/hotkv-server compile && chmod -R g=u /var/cache/hotkv

FROM python:${PYTHON}-slim
ARG VARIANT=cpu
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="hotkv-server" \
      org.opencontainers.image.description="One KV cache per node, in host memory, shared by every vLLM engine on it" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}-${VARIANT}"
RUN groupadd --gid 10001 hotkv \
 && useradd --no-log-init --uid 10001 --gid hotkv --no-create-home --shell /usr/sbin/nologin hotkv \
 && install -d -o hotkv -g hotkv -m 0755 /run/hotkv
COPY --from=build /opt/hotkv /opt/hotkv
COPY --from=build --chown=10001:0 /var/cache/hotkv /var/cache/hotkv
ENV PATH=/opt/hotkv/bin:$PATH \
    NUMBA_CACHE_DIR=/var/cache/hotkv \
    PYTHONUNBUFFERED=1 \
    HOTKV_ARENA__DIR=/dev/shm/hotkv
USER 10001:10001
EXPOSE 9433
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=2m --retries=3 CMD ["hotkv", "ping", "--live", "--timeout-s", "3"]
ENTRYPOINT ["hotkv-server"]
CMD ["run"]
