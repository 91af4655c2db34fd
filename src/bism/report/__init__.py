from .figures import curves as curves, densities as densities, galleries as galleries, scatter as scatter
from .page import Page as Page
