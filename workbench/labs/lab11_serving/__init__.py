"""Lab 11, serving: the engine behind a socket, what that costs, and what it does under load.

Beside them: `loopback`, a server in a thread of this process and its clients; `loads`, the requests that are sent to it
and what its steps say of the time that they take.
"""

PREFIX = "server"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "breakdown",
    "overhead",
    "definitions",
    "knee",
    "overload",
    "ordering",
    "choose",
    "live",
)
PANELS = ("breakdown", "overhead", "definitions", "knee", "overload", "ordering", "choose", "live")
