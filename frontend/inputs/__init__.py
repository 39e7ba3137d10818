"""What a prompt may be beside text: token ids, hidden states, images and sounds, encoder inputs."""
