"""What the layers of decoders are made of: attention or another mixer, and a feed-forward."""
