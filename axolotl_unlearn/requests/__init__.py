"""Deletion requests: which rows, the run, the ledger, the record, erasing and later audits."""
