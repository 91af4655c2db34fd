from .figures import curves as curves, densities as densities, mosaics as mosaics, scatter as scatter
from .page import Page as Page
