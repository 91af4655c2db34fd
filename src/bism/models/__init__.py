from .deep import (
    ConvPosteriorNet as ConvPosteriorNet,
    ResidualNet as ResidualNet,
    ResNetEnergy as ResNetEnergy,
    ResNetFreeEnergy as ResNetFreeEnergy,
    conv_posterior as conv_posterior,
)
from .grbm import GaussianRBM as GaussianRBM
from .mlp import MLPEnergy as MLPEnergy, MLPFreeEnergy as MLPFreeEnergy
