"""Text by diffusion: a canvas of masked tokens, denoised over a few passes. See `docs/map.md`."""
