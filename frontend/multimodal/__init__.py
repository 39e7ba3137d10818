"""Images and sounds of prompts to the tensors that a model's encoder takes, without torch. Modules
here import numpy and Pillow; nobody imports them before a prompt has an image or a sound."""
