"""Lab 11, serving.

Beside them: `servers`, `probes`, `peer_llama_cpp_http`.
"""

PREFIX = "server"
EXPERIMENTS = ("engines",)
PANELS = ()
