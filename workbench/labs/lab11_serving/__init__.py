"""Lab 11, serving: an engine behind an API, the load that is put on it, and what counts as served.

Beside them: `servers`, servers of others in processes of their own, `peer_llama_cpp_http`, one of these; `probes`, what
a server does when it is asked.
"""

PREFIX = "server"  # an experiment's name is PREFIX.stem
EXPERIMENTS = ("engines",)
PANELS = ()
