from .figures import curves as curves, densities as densities, scatter as scatter
from .page import Page as Page
