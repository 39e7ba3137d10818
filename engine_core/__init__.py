"""The daemon: scheduler, KV cache, model runner, and the loop that ties them to the sockets.

Imports nothing here, so that `engine-core --help` and the scheduler alone stay quick."""
