# Sourced by the scripts beside it: makes the virtual environment once and keeps it as long as the requirements stay.
#   make_environment FOLDER REQUIREMENTS...   installs what is missing; sets PY to the environment's Python.

find_python() {
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$candidate"; return; }
  done
  echo "No Python 3.11 or newer was found. Install one, or set PYTHON=/path/to/python3." >&2
  return 1
}

make_environment() {
  local folder=$1 python file stamp
  shift
  python=$(find_python) || return 1
  PY="$folder/bin/python"
  [ -x "$PY" ] || "$python" -m venv "$folder"
  for file in "$@"; do
    stamp="$("$PY" -V) $(cksum "$file")"
    grep -qxF "$stamp" "$folder/installed" 2>/dev/null && continue
    echo "Installing $file into $folder (once; some minutes) ..."
    "$PY" -m pip install --quiet --disable-pip-version-check -r "$file" || return 1
    echo "$stamp" >> "$folder/installed"
  done
}
