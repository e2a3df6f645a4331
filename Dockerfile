# `expire-span` with everything that serves retrofitted models and shows what they remember; see docs/server.md.
FROM python:3.12-slim

# An index that has torch for CPUs alone makes a much smaller image: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY expire_span expire_span
RUN pip install --quiet --constraint constraints.txt "expire-span[hf] @ file://$PWD"

# Any user may keep sessions, runs and downloaded models below /data; mount a volume there to keep them.
WORKDIR /data
RUN mkdir -m 1777 home runs sessions
ENV HOME=/data/home
USER 1000:1000

# Without a model, the small one that comes with the package is served.
EXPOSE 8000
ENTRYPOINT ["expire-span"]
CMD ["serve", "--host", "0.0.0.0", "--session-folder", "sessions"]
