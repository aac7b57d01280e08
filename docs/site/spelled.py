"""An extension of griffe for the pages of the API: settings spelled out."""
