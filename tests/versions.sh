#!/usr/bin/env bash
# The fast tests with other versions, each in an environment of its own and from a copy of the tree that is not installed:
#   tests/versions.sh [PYTHON/TORCH/TRANSFORMERS ...] [-- PYTEST_WORDS]
# Without words: every combination of CASES. Results go to tests/versions.json (docs/versions.md shows the last ones).
# Torch comes as the package index has it: on Linux a CUDA build with its libraries, about 3 GB an environment; with
# TORCH_WHEELS=FOLDER, or a PIP_EXTRA_INDEX_URL of CPU builds, from there. A combination that cannot be installed, or whose
# Python is not here, is skipped and said.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
home=${VERSIONS_HOME:-$root/.venv-versions}
CASES=(
  3.11/2.10.0/5.16.0 3.11/2.11.0/5.17.0 3.11/2.13.0/5.23.0
  3.12/2.10.0/5.16.0 3.12/2.11.0/5.17.0 3.12/2.13.0/5.23.0
)
wanted=() words=(-m "not slow and not gpu and not slurm and not vllm")
while [ $# -gt 0 ]; do
  if [ "$1" = -- ]; then
    shift
    words+=("$@")
    break
  fi
  wanted+=("$1")
  shift
done
[ ${#wanted[@]} -gt 0 ] || wanted=("${CASES[@]}")

interpreter() { # of a version of Python; nothing where there is none
  command -v "python$1" >/dev/null && "python$1" -c "import sys; print(sys.executable)" 2>/dev/null && return
  ls "$HOME"/.pyenv/versions/"$1".*/bin/python 2>/dev/null | tail -1
}

prepare() { # the environment of a case
  local place=$1 python=$2 torch=$3 transformers=$4
  [ -e "$place/.installed" ] && return
  "$python" -m venv "$place" || return
  local pip=("$place/bin/python" -m pip install -q --disable-pip-version-check ${TORCH_WHEELS:+--find-links "$TORCH_WHEELS"})
  # Other packages as they are tested together, but for what the case changes.
  grep -viE '^(torch|transformers|numpy|tokenizers|huggingface_hub)==' "$root/constraints.txt" >"$place/constraints.txt"
  "${pip[@]}" "torch==$torch" "transformers==$transformers" -c "$place/constraints.txt" || return
  "$place/bin/python" - "$root/pyproject.toml" >"$place/needs.txt" <<'P'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
test = [one for one in project["optional-dependencies"]["dev"] if one.startswith(("pytest", "hypothesis"))]
print("\n".join(one for one in [*project["dependencies"], *test] if not one.startswith(("torch>", "transformers>"))))
P
  "${pip[@]}" -r "$place/needs.txt" -c "$place/constraints.txt" || return
  touch "$place/.installed"
}

status=0
for case in "${wanted[@]}"; do
  IFS=/ read -r python torch transformers <<<"$case"
  place=$home/py$python-torch$torch-transformers$transformers
  found=$(interpreter "$python")
  if [ -z "$found" ]; then
    echo "$case: skipped, Python $python is not here"
    continue
  fi
  if ! prepare "$place" "$found" "$torch" "$transformers"; then
    echo "$case: skipped, it cannot be installed here"
    continue
  fi
  tree=$(mktemp -d)
  git -C "$root" ls-files -z | (cd "$root" && xargs -0 cp --parents -t "$tree")
  git -C "$tree" init -q && git -C "$tree" add -A # tests ask git for the project's files
  told=$(cd "$tree" && OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$tree "$place/bin/python" -m pytest \
    -p no:cacheprovider "${words[@]}" 2>&1 | tee "$place/last.log" | tail -1)
  grep -qE '[0-9]+ passed' <<<"$told" && ! grep -qE '(failed|error)' <<<"$told" || status=1
  echo "$case: $told"
  "$place/bin/python" - "$root/tests/versions.json" "$case" "$told" <<'P'
import json, pathlib, sys, time
path, case, told = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3].strip("= ")
found = json.loads(path.read_text()) if path.is_file() else {}
found[case] = {"result": told, "date": time.strftime("%Y-%m-%d")}
path.write_text(json.dumps(found, indent=1) + "\n")
P
  rm -rf "$tree"
done
exit $status
