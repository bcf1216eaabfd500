"""Membership attacks, a file each or one for several that look alike; `attacks.registry` finds all
files of this folder."""
