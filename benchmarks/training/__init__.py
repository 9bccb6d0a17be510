"""Training small block-diffusion drafters and the small target they are tested on."""
