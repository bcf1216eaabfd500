"""The trainer that Axolotl runs, and what happens when."""
