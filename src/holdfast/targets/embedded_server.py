"""The process behind the embedded model: llama.cpp's server on loopback, until standard input ends."""

from __future__ import annotations

import os
import sys
import threading


def main() -> None:
    """Serve the weights named on the command line, so many requests at once with so many threads, and print where."""
    # From the first moment on, also while the model is loading: whoever started us may be killed at any time.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_parallel = int(sys.argv[2])
    params.n_ctx = 2048 * params.n_parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_gpu_layers = 0
    params.use_jinja = True
    server = xllamacpp.Server(params)
    try:
        sys.stdout.write(f"listening {server.listening_address}\n")
        sys.stdout.flush()
    except OSError:
        os._exit(0)  # nobody listens any more
    threading.Event().wait()


def _leave_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)  # llama.cpp's threads have nothing to save


if __name__ == "__main__":
    main()
