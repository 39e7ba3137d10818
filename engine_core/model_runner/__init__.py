"""From a plan to sampled tokens: the same for every model, with a runner for each kind of device.

What both runners need is in this folder; must not know sockets, files or a model's architecture."""
