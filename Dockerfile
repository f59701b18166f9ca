# hotkv-server. Build: docker build -t hotkv .
# Run: docker run --rm --shm-size=9g --ulimit memlock=-1 -v /dev/shm/hotkv:/dev/shm/hotkv hotkv run --arena.bytes 8GiB
# Engines in other containers need the same directory mounted; they map the arena through it.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY client client
COPY server server
COPY connector_vllm connector_vllm
RUN python -m venv /opt/hotkv \
 && /opt/hotkv/bin/pip install --no-cache-dir '.[server,events]'

FROM python:${PYTHON}-slim
RUN useradd --system --uid 10001 --user-group --home-dir /var/cache/hotkv --create-home hotkv
COPY --from=build /opt/hotkv /opt/hotkv
# Compiled kernels are kept here; a volume saves the compilation at the first start.
ENV PATH=/opt/hotkv/bin:$PATH NUMBA_CACHE_DIR=/var/cache/hotkv PYTHONUNBUFFERED=1
USER hotkv
STOPSIGNAL SIGTERM
ENTRYPOINT ["hotkv-server"]
CMD ["run"]
