"""Lab 11, serving: the engine behind a socket, what that costs, and what it does under load.

Beside them: `loopback`, a server in a thread of this process and its clients; `loads`, the requests that are sent to it
and what its steps say of the time that they take; `servers`, servers of others in processes of their own,
`peer_llama_cpp_http`, one of these; `probes`, what a server does when it is asked; `processes`, a model for engines in
processes of their own.
"""

PREFIX = "server"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "breakdown",
    "overhead",
    "definitions",
    "knee",
    "overload",
    "ordering",
    "transfer",
    "beside_twin",
    "pools",
    "tiers",
    "offload",
    "replicas",
    "choose",
    "live",
    "engines",
)
PANELS = (
    "breakdown",
    "overhead",
    "definitions",
    "knee",
    "overload",
    "ordering",
    "transfer",
    "beside_twin",
    "pools",
    "tiers",
    "offload",
    "replicas",
    "choose",
    "live",
)
