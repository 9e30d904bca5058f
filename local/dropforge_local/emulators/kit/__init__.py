"""The grammar that the emulators share: one way to do each thing that every Google API has."""
