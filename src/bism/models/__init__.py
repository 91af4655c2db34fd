from .grbm import GaussianRBM as GaussianRBM
from .mlp import MLPEnergy as MLPEnergy, MLPFreeEnergy as MLPFreeEnergy
