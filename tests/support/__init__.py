"""What tests share: models, builders of files, faults of machines. No test is in here."""
