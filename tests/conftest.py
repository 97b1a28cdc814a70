"""For all tests."""

import signal

# Started in the background of a shell, tests may find Ctrl-C ignored, and runs then rightly ignore it, too. Some
# tests are about Ctrl-C, in this process and in those that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
