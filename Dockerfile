# Miles for one NVIDIA GPU:
#   docker build -t miles .
#   docker run --rm --gpus all -v "$HOME/miles-lab:/root/lab" -e MILES_LAB=/root/lab \
#       -e MILES_NUM_ROLLOUT=12 -e MILES_RUN=plain miles
FROM python:3.12-slim-bookworm

# A C compiler: Triton builds a small launcher for each kernel. The base image's release fixes the versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/miles
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY miles ./miles
COPY recipes ./recipes
RUN pip install --no-cache-dir --constraint constraints.txt --editable '.[gpu,serve]'

ENV PYTHONUNBUFFERED=1
WORKDIR /root/lab
CMD ["python", "/opt/miles/recipes/grpo_gsm8k.py"]
