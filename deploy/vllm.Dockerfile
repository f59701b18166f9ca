# vLLM with hotkv's connector. In a clone:
#   docker build -t vllm-hotkv:0.1.0 -f deploy/vllm.Dockerfile .
# For engines on CPUs: --build-arg BASE=public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0

ARG BASE=vllm/vllm-openai:v0.32.0

FROM ${BASE}
WORKDIR /src/hotkv
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY sparse sparse
COPY client client
COPY server server
COPY connector_vllm connector_vllm
# The base image has vLLM, torch and numba; pip adds grpcio, which the connector needs. vLLM's images have uv; some have no pip.
RUN if command -v uv > /dev/null; \
    then uv pip install --no-cache --python "$(command -v python3)" .; \
    else python3 -m pip install --no-cache-dir .; \
    fi \
 && python3 -c "import hotkv_vllm.plugin"
