"""The control: as `sitecustomize` it switches every sync off, and then a power cut must lose what was counted."""

import os

os.fsync = os.fdatasync = lambda _: None
