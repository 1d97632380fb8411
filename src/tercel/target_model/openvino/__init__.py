"""The target's blocks and logits as OpenVINO graphs, on a CPU.

Without its helper `openvino_telemetry`, which tells its makers of every import and conversion, OpenVINO works the same.
"""

import sys
from typing import cast

cast("dict[str, object]", sys.modules).setdefault("openvino_telemetry", None)  # as if it were not installed
