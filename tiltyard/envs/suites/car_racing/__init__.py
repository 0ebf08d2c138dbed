"""`car-racing:NAME`, Gymnasium's CarRacing: the family, its fast physics (fast_core.py) and drawing (raster.py)."""
