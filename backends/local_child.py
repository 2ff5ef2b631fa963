"""One llama.cpp server in this process, for as long as the parent lives.

Started by `backends.local` as `python -m backends.local_child`. Prints its base URL on standard
output once the model is loaded, then waits for standard input to end, which it does when the
parent closes it or dies. On Linux the kernel also kills this process when the parent's thread is
gone, so a parent that was killed with SIGKILL leaves nothing behind even if somebody inherited the
pipe.
"""

import argparse
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exit if it already has.

    Outside Linux only the second half happens; there the end of standard input is the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died between fork and the line above
        os._exit(0)


def serve(arguments: argparse.Namespace) -> None:
    """Load the model, print the base URL, return when standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.model_alias = {arguments.alias}
    params.hostnames = ["127.0.0.1"]  # never reachable from outside
    params.port = arguments.port  # 0: a free one
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.context * arguments.slots  # llama.cpp splits it over the slots
    params.n_batch = params.n_ubatch = arguments.batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = arguments.slots + 12  # each open stream holds one; room for polls
    params.cache_ram_mib = 0  # no second prompt cache beside the slots: memory stays predictable
    params.fit_params = False  # sizes are as asked for, never adjusted to the machine
    params.endpoint_metrics = params.endpoint_slots = True
    params.ui = False
    params.verbosity = 1  # errors only; they go to the parent's log of this child
    with os.fdopen(os.dup(1), "w") as parent:
        os.dup2(2, 1)  # whatever the engine prints from here on cannot fill the parent's pipe
        try:
            server = xllamacpp.Server(params)
        except RuntimeError as error:  # the engine's own words are above this line
            sys.exit(f"llama.cpp cannot serve {arguments.model} on port {arguments.port}: {error}")
        parent.write(f"{server.listening_address}\n")
    sys.stdin.buffer.read()


def main() -> None:
    """Parse the command line and serve; ends without running exit handlers of the engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="path of a GGUF file")
    parser.add_argument("--alias", required=True, help="model name to answer to")
    parser.add_argument(
        "--port", type=int, required=True, help="port on 127.0.0.1; 0 for a free one"
    )
    parser.add_argument("--slots", type=int, required=True, help="requests decoded at once")
    parser.add_argument("--context", type=int, required=True, help="tokens per slot")
    parser.add_argument("--batch", type=int, required=True, help="prompt tokens per step")
    parser.add_argument("--parent", type=int, required=True, help="process id to live and die with")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the parent's to handle: it drains first
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(arguments.parent)
    serve(arguments)
    os._exit(0)


if __name__ == "__main__":
    main()
