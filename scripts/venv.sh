# Sourced by the other scripts: makes .venv with Python 3.11 or later and uv in it. Sets VENV and defines `install`.
VENV=${HOLDFAST_VENV:-.venv}

alone() { # until `install` has ended: scripts that start together make one environment
    ! command -v flock >/dev/null || { exec 9>"$VENV.lock" && flock 9; }
}

[ -x "$VENV/bin/python" ] || alone
if [ ! -x "$VENV/bin/python" ]; then
    PYTHON=
    for name in "${PYTHON3:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
        if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            PYTHON=$name
            break
        fi
    done
    if [ -z "$PYTHON" ]; then
        echo "Holdfast needs Python 3.11 or later; name one with PYTHON3=/path/to/python" >&2
        exit 2
    fi
    "$PYTHON" -m venv "$VENV" || {
        echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 2
    }
fi

# uv is quicker; where it cannot be had, pip does the same.
"$VENV/bin/python" -m uv --version >/dev/null 2>&1 || "$VENV/bin/python" -m pip install -q --disable-pip-version-check uv || true

install() { # a lock file, then this project itself; nothing that is not in the lock
    alone
    if "$VENV/bin/python" -m uv --version >/dev/null 2>&1; then
        pip="$VENV/bin/python -m uv pip install -q --python $VENV/bin/python --compile-bytecode"
    else
        pip="$VENV/bin/python -m pip install -q --disable-pip-version-check"
    fi
    $pip --no-deps --require-hashes -r "$1"
    # Installed again, the project would be missing for a moment, and tests that run in this checkout would fail.
    wanted="$PWD $(cat pyproject.toml src/holdfast/versions.py | cksum)"
    if [ "$(cat "$VENV/holdfast-installed" 2>/dev/null)" != "$wanted" ] || ! "$VENV/bin/python" -c 'import holdfast'; then
        $pip --no-deps --no-build-isolation -e .
        echo "$wanted" >"$VENV/holdfast-installed"
    fi
    "$VENV/bin/python" -m compileall -q src # where Python is told to write no bytecode, starting would be slow
    exec 9>&-
}
