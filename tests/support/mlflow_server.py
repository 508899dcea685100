"""Run as a program: MLflow's tracking server, with its database and artefacts in a folder. Takes the folder and a port.

`mlflow server` starts another process for it, and both import the whole of MLflow.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module


def main() -> None:
    folder, port = sys.argv[1:]
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # which takes a dozen processes
    server = import_module("mlflow.server")
    os.environ[server.BACKEND_STORE_URI_ENV_VAR] = f"sqlite:///{folder}/mlflow.db"
    os.environ[server.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
    os.environ[server.ARTIFACTS_DESTINATION_ENV_VAR] = f"{folder}/files"
    os.environ[server.SERVE_ARTIFACTS_ENV_VAR] = "true"
    import_module("uvicorn").run("mlflow.server.fastapi_app:app", host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    main()
