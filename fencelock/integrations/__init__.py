"""Modules for other packages. Each imports only the package that it is named after."""
