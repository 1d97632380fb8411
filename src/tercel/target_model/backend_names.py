"""What can compute a target, and in which weights, by name; without torch, since names are asked for before it is
there."""

TORCH, OPENVINO = "torch", "openvino"
AUTO = "auto"  # the fastest that gives the same here: see `backends.with_backend`
BACKENDS = (AUTO, TORCH, OPENVINO)
NONE, FSDP, TENSOR = SHARDINGS = ("none", "fsdp", "tensor")  # how several processes share one
INT8 = "int8"
WEIGHTS = (INT8,)  # beside those that a model was stored with
