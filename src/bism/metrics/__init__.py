"""How good images, features and latents are: FID, linear probes, t-SNE, nearest neighbours."""

from . import features as features, fid as fid, inception as inception
