# Sourced by the lab's scripts. Sets LAB, the directory that holds everything of one lab: the first argument, else
# $HOLDFAST_LAB, else one of this checkout's own below the temporary directory. Two checkouts never meet.
here=$(cd "$(dirname "$0")/../.." && pwd)
LAB=${1:-${HOLDFAST_LAB:-${TMPDIR:-/tmp}/holdfast-lab-$(id -u)-$(printf %s "$here" | cksum | cut -d' ' -f1)}}
PATH=$PATH:/usr/sbin
export SLURM_CONF="$LAB/slurm.conf"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# The first line of a file, read without starting a process.
first_line() { # file
    { read -r line <"$1"; } 2>/dev/null
}

# Whether a process lives. A zombie does not: a container's first process may be slow to collect it.
lives() { # pid
    local line
    first_line "/proc/$1/stat" || return 1
    case "${line##*) }" in Z* | X*) return 1 ;; esac
}

# The process a pid file names, if it lives and is the program we started: process ids are used again.
running() { # pid file, program
    local line pid
    first_line "$1" && pid=$line && [ -n "$pid" ] && lives "$pid" && first_line "/proc/$pid/comm" && [ "$line" = "$2" ] && echo "$pid"
}

stop() { # pid file, program
    local pid
    if pid=$(running "$1" "$2"); then
        kill "$pid"
        for _ in $(seq 100); do lives "$pid" && sleep 0.05 || break; done
        ! lives "$pid" || kill -KILL "$pid"
    fi
    rm -f "$1"
}

taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; } # port

# Reserve 16 ports for this lab, unless another one that still exists has them: it may not listen yet.
reserve() { # first port
    local link="/tmp/holdfast-ports-$(id -u)/$1"
    mkdir -p "${link%/*}"
    [ -e "$link" ] || rm -f "$link"
    ln -sn "$LAB" "$link" 2>/dev/null
}

# The first of 16 ports that are this lab's from its first start on. They lie below those the kernel hands out.
ports() {
    local first port tries
    if [ ! -s "$LAB/ports" ]; then
        first=$((20000 + $(printf %s "$LAB" | cksum | cut -d' ' -f1) % 750 * 16))
        for tries in $(seq 750); do
            for port in $(seq $first $((first + 15))); do
                if taken "$port"; then
                    first=$((20000 + (first - 20000 + 16) % 12000))
                    continue 2
                fi
            done
            ! reserve $first || break
            first=$((20000 + (first - 20000 + 16) % 12000))
        done
        echo "$first" >"$LAB/ports"
    fi
    cat "$LAB/ports"
}
