//! Reads a moepack pack in Rust, with nothing but the standard library. An example to copy.
//!
//!     rustc -O --edition 2021 read_pack.rs         (1.82 or later)
//!     ./read_pack model.moepack LAYER EXPERT...    the parts of some experts, with their digests
//!     ./read_pack model.moepack                    all of it, to see whether it can be read
//!
//! It was written from the specification, layouts/FORMAT.md, and keeps all of its obligations but
//! those of the manifest, from which it only takes the name of the index. `Pack` opens and locates;
//! `Pack::read_expert` is one read of a blob, or one for each part where there is no blob. It does
//! not verify: that ranks fall, padding is zero and nothing overlaps is for `moepack verify` to say.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

type Result<T> = std::result::Result<T, String>;

const MAX_LENGTH: u64 = (1 << 63) - 1;
const DATA_FILE: u32 = 0;
const SHARD_FILE: u32 = 1;

/// name, bytes of a record, least and largest count: the sections of version 1.
const SECTIONS: [(&str, usize, u64, u64); 10] = [
    ("files", 272, 1, 8192),
    ("families", 64, 1, 4096),
    ("part_kinds", 152, 1, 32768),
    ("blobs", 32, 1, 1 << 22),
    ("parts", 32, 1, 1 << 24),
    ("ranks", 4, 1, 1 << 22),
    ("slices", 16, 0, 1 << 24),
    ("tensors", 376, 0, 1 << 20),
    ("shard_bytes", 40, 0, 1 << 20),
    ("strong_digests", 32, 1, 1 << 25),
];

fn check(holds: bool, problem: impl FnOnce() -> String) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(problem())
    }
}

// ---- records ----

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// A text that is padded with zeros, at least one, to the end of its field.
fn text_at(bytes: &[u8], at: usize, size: usize) -> Result<&str> {
    let field = &bytes[at..at + size];
    let end = field.iter().position(|&byte| byte == 0).ok_or("a name without a zero after it")?;
    check(end > 0 && field[end..].iter().all(|&byte| byte == 0), || "a bad name".to_string())?;
    std::str::from_utf8(&field[..end]).map_err(|_| "a name is not UTF-8".to_string())
}

/// A name of letters, digits, `.`, `_` and `-`.
fn name_at(bytes: &[u8], at: usize, size: usize) -> Result<&str> {
    let name = text_at(bytes, at, size)?;
    let is_name = name.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c));
    check(is_name, || format!("not a name: {name:?}"))?;
    Ok(name)
}

/// Whether a name is valid as that of a file on every system.
fn is_plain(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let stem = lower.split('.').next().unwrap_or("");
    let is_numbered = stem.len() == 4 && stem.ends_with(|c: char| c.is_ascii_digit());
    let is_device = ["con", "prn", "aux", "nul"].contains(&stem)
        || is_numbered && (stem.starts_with("com") || stem.starts_with("lpt"));
    (1..256).contains(&name.len())
        && name.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c))
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && !name.ends_with('.')
        && !is_device
        && !["manifest.json", "manifest.json.tmp", "pack.journal"].contains(&lower.as_str())
}

fn is_inside(offset: u64, length: u64, whole: u64) -> bool {
    length <= whole && offset <= whole - length
}

/// Whether `count` axes are a shape: none of them 0, unless `may_be_empty`, and the others 0.
fn is_shape(axes: &[u64], count: u32, may_be_empty: bool) -> bool {
    let count = count as usize;
    let product = axes.iter().filter(|&&n| n > 0).try_fold(1u64, |all, &n| all.checked_mul(n));
    count <= axes.len()
        && axes[count.min(axes.len())..].iter().all(|&n| n == 0)
        && (may_be_empty || axes[..count].iter().all(|&n| n > 0))
        && product.is_some_and(|all| all <= MAX_LENGTH)
}

#[derive(Clone, Copy, Default)]
struct Section {
    offset: usize,
    count: u64,
    record_length: usize,
}

struct DataFile {
    name: String,
    length: u64,
    kind: u32,
    has_digests: bool,
}

struct Family {
    layer: u32,
    name: String,
    expert_count: u32,
    first_blob: u64,
    first_part: u64,
    kinds: Vec<PartKind>,
}

struct PartKind {
    name: String,
    length: u64,
}

/// Where bytes are; `digest` is None where it is unknown.
struct Place {
    file: usize,
    offset: u64,
    length: u64,
    digest: Option<u64>,
}

// ---- opening ----

struct Pack {
    folder: PathBuf,
    index: Vec<u8>,
    sections: HashMap<String, Section>,
    blob_alignment: u64,
    tensor_alignment: u64,
    files: Vec<DataFile>,
    families: Vec<Family>,
}

impl Pack {
    /// Open a pack. If that fails, the manifest is read once more: a new ranking replaces it and the
    /// index.
    fn open(folder: &Path) -> Result<Pack> {
        let named = || index_name(&read_file(&folder.join("manifest.json"), 8 << 20)?);
        let name = named()?;
        Pack::open_index(folder, &name).or_else(|problem| match named()? {
            newer if newer != name => Pack::open_index(folder, &newer),
            _ => Err(problem),
        })
    }

    fn open_index(folder: &Path, name: &str) -> Result<Pack> {
        let index = read_file(&folder.join(name), 1 << 30)?;
        check(index.len() >= 64, || "the index is cut short".to_string())?;
        let mut pack = Pack {
            folder: folder.to_path_buf(),
            sections: HashMap::new(),
            blob_alignment: u64_at(&index, 32),
            tensor_alignment: u64_at(&index, 48),
            files: Vec::new(),
            families: Vec::new(),
            index,
        };
        pack.check_header()?;
        pack.read_directory()?;
        pack.read_files(name)?;
        pack.read_families()?;
        pack.check_shards()?;
        Ok(pack)
    }

    fn check_header(&self) -> Result<()> {
        let head = &self.index[..56];
        check(&head[..8] == b"MOEPACK\0", || "not a moepack index".to_string())?;
        let version = u32_at(head, 8);
        check(version == 1, || format!("format version {version}, expected 1"))?;
        let (length, record_length) = (u32_at(head, 12), u32_at(head, 28));
        let is_length = |n: u32, least| (least..=65536).contains(&n) && n % 8 == 0;
        check(is_length(length, 56) && is_length(record_length, 48), || {
            "wrong length".to_string()
        })?;
        let is_whole = u64_at(head, 16) == self.index.len() as u64;
        check(is_whole, || "the index is not as long as it says".to_string())?;
        check((1..=256).contains(&u32_at(head, 24)), || "section_count".to_string())?;
        let is_alignment = |n: u64| n.is_power_of_two() && n <= 1 << 30;
        let part_alignment = u64_at(head, 40);
        let are_sound = is_alignment(self.blob_alignment)
            && is_alignment(part_alignment)
            && is_alignment(self.tensor_alignment)
            && part_alignment <= self.blob_alignment;
        check(are_sound, || "an alignment".to_string())
    }

    /// Find the sections, each where the one before ends, and compare the digest of the index.
    fn read_directory(&mut self) -> Result<()> {
        let index = &self.index;
        let body = index.len() - 8;
        let (start, each) = (u32_at(index, 12) as usize, u32_at(index, 28) as usize);
        let count = u32_at(index, 24) as usize;
        let mut end = start + count * each;
        check(end <= body.min(65536), || "the directory is too long".to_string())?;
        // Whatever follows starts at a multiple of 64, after zeros.
        let next = |end: usize| -> Result<usize> {
            let next = end.div_ceil(64) * 64;
            let is_sound = next <= body && index[end..next].iter().all(|&byte| byte == 0);
            check(is_sound, || format!("not only zeros up to byte {next} of the index"))?;
            Ok(next)
        };
        for n in 0..count {
            let record = &index[start + n * each..][..each];
            let name = name_at(record, 0, 24)?;
            let (offset, record_count) = (u64_at(record, 24), u64_at(record, 32));
            let (length, flags) = (u32_at(record, 40) as usize, u32_at(record, 44));
            check(flags <= 1, || format!("{name}: unknown flags"))?;
            check((1..=65536).contains(&length), || format!("{name}: record length"))?;
            let version_1 = SECTIONS.iter().find(|section| section.0 == name);
            if let Some(&(_, least_length, least, most)) = version_1 {
                let step = if name == "ranks" { 4 } else { 8 };
                let is_sound = length >= least_length && length % step == 0;
                check(is_sound, || format!("{name}: wrong record length"))?;
                check((least..=most).contains(&record_count), || format!("{name}: count"))?;
            }
            check(version_1.is_some() || flags == 0, || {
                format!("needs the section {name:?}, which this reader does not know")
            })?;
            check(n > 2 || SECTIONS[n].0 == name, || format!("{name} comes too early"))?;
            let is_next = offset == next(end)? as u64;
            check(is_next, || format!("{name}: not where the section before it ends"))?;
            let bytes = record_count.checked_mul(length as u64);
            let is_sound = bytes.is_some_and(|bytes| bytes <= body as u64 - offset);
            check(is_sound, || format!("{name}: ends past the index"))?;
            end = offset as usize + record_count as usize * length;
            let section =
                Section { offset: offset as usize, count: record_count, record_length: length };
            let is_first = self.sections.insert(name.to_string(), section).is_none();
            check(is_first, || format!("the section {name} is there twice"))?;
        }
        check(next(end)? == body, || "the sections do not end at the trailer".to_string())?;
        let needed = SECTIONS[..6].iter().all(|section| self.sections.contains_key(section.0));
        check(needed, || "a section is missing".to_string())?;
        check(self.count("ranks") == self.count("blobs"), || {
            "not a rank for each blob".to_string()
        })?;
        let digested = self.count("parts") + self.count("tensors") + self.count("shard_bytes");
        let is_sound = [0, digested].contains(&self.count("strong_digests"));
        check(is_sound, || "strong_digests: not one for each".to_string())?;
        let is_sound = xxh3(&index[..body]) == u64_at(index, body);
        check(is_sound, || "the index is damaged: its digest differs".to_string())
    }

    fn count(&self, section: &str) -> u64 {
        self.sections.get(section).map_or(0, |section| section.count)
    }

    /// A record of a section; the caller has checked that it exists.
    fn record(&self, section: &str, n: u64) -> &[u8] {
        let section = self.sections[section];
        assert!(n < section.count);
        &self.index[section.offset + n as usize * section.record_length..][..section.record_length]
    }

    fn read_files(&mut self, index_name: &str) -> Result<()> {
        let mut names = HashSet::from([index_name.to_ascii_lowercase()]);
        for n in 0..self.count("files") {
            let record = self.record("files", n);
            let name = text_at(record, 0, 256)?.to_string();
            let (length, kind) = (u64_at(record, 256), u32_at(record, 264));
            let flags = u32_at(record, 268);
            let lower = name.to_ascii_lowercase();
            check(is_plain(&name) && lower != "index.bin", || {
                format!("file {n}: not a plain name")
            })?;
            check(names.insert(lower), || format!("two files are called {name}"))?;
            check((1..=MAX_LENGTH).contains(&length), || format!("{name}: length"))?;
            check(kind <= SHARD_FILE, || {
                format!("{name}: needs files of kind {kind}, which this reader does not know")
            })?;
            check(flags <= 1, || format!("{name}: unknown flags"))?;
            self.files.push(DataFile { name, length, kind, has_digests: flags == 0 });
        }
        Ok(())
    }

    fn read_families(&mut self) -> Result<()> {
        let (mut blobs, mut kinds, mut parts) = (0, 0, 0);
        for n in 0..self.count("families") {
            let record = self.record("families", n);
            let (layer, expert_count) = (u32_at(record, 0), u32_at(record, 4));
            let (part_count, flags) = (u32_at(record, 8), u32_at(record, 12));
            let name = name_at(record, 32, 32)?.to_string();
            let is_sound = layer < 65536
                && (1..=65536).contains(&expert_count)
                && (1..=64).contains(&part_count)
                && flags <= 1
                && u64::from(u32_at(record, 16)) == blobs
                && u64::from(u32_at(record, 20)) == kinds
                && u64_at(record, 24) == parts
                && kinds + u64::from(part_count) <= self.count("part_kinds");
            check(is_sound, || format!("family {n} breaks a rule"))?;
            let is_in_order =
                self.families.last().is_none_or(|family: &Family| family.layer <= layer);
            check(is_in_order, || "families are not in the order of layers".to_string())?;
            let of_layer = self.families.iter().rev().take_while(|family| family.layer == layer);
            let is_first = of_layer.into_iter().all(|family| family.name != name);
            check(is_first, || format!("two families {name} in layer {layer}"))?;
            let of_family = kinds..kinds + u64::from(part_count);
            let of_family: Vec<PartKind> =
                of_family.map(|kind| self.part_kind(kind, expert_count)).collect::<Result<_>>()?;
            let names: HashSet<&str> = of_family.iter().map(|kind| kind.name.as_str()).collect();
            check(names.len() == of_family.len(), || {
                format!("family {n}: two parts have one name")
            })?;
            self.families.push(Family {
                layer,
                name,
                expert_count,
                first_blob: blobs,
                first_part: parts,
                kinds: of_family,
            });
            blobs += u64::from(expert_count);
            kinds += u64::from(part_count);
            parts += u64::from(expert_count) * u64::from(part_count);
        }
        let sums = [("blobs", blobs), ("part_kinds", kinds), ("parts", parts)];
        check(sums.iter().all(|&(name, sum)| self.count(name) == sum), || {
            "counts differ".to_string()
        })
    }

    fn part_kind(&self, n: u64, expert_count: u32) -> Result<PartKind> {
        let record = self.record("part_kinds", n);
        let name = name_at(record, 0, 64)?.to_string();
        name_at(record, 104, 24)?; // of the type
        let (flags, dimension_count) = (u32_at(record, 68), u32_at(record, 72));
        let (length, shard, first_slice) =
            (u64_at(record, 96), u32_at(record, 128), u32_at(record, 132));
        let (shard_offset, stride) = (u64_at(record, 136), u64_at(record, 144));
        let end = stride.checked_mul(expert_count.into()).and_then(|n| n.checked_add(shard_offset));
        let is_origin = match flags & 2 {
            0 => first_slice == 0 && stride > 0 && end.is_some_and(|end| end <= MAX_LENGTH),
            _ => shard == 0 && shard_offset == 0 && stride == 0,
        };
        let is_sound = flags <= 3
            && is_shape(&[u64_at(record, 80), u64_at(record, 88)], dimension_count, false)
            && (1..=MAX_LENGTH).contains(&length)
            && shard < 4096
            && is_origin;
        check(is_sound, || format!("part kind {n} ({name}) breaks a rule"))?;
        Ok(PartKind { name, length })
    }

    /// Whether the shards under an index over shards are those that were indexed.
    fn check_shards(&self) -> Result<()> {
        let mut shards = self.files.iter().filter(|file| file.kind == SHARD_FILE).peekable();
        if shards.peek().is_none() {
            return Ok(());
        }
        for file in shards {
            let found = fs::metadata(self.folder.join(&file.name)).map_err(|e| e.to_string())?;
            let is_sound = found.is_file() && found.len() == file.length;
            check(is_sound, || format!("{}: not the shard that was indexed", file.name))?;
        }
        for n in 0..self.count("shard_bytes") {
            let record = self.record("shard_bytes", n);
            let digest = Some(u64_at(record, 32));
            let (file, shard_offset) = (u32_at(record, 4) as usize, u64_at(record, 8));
            let (length, offset) = (u64_at(record, 16), u64_at(record, 24));
            check(length > 0, || format!("shard bytes {n}: length"))?;
            let place = Place { file, offset, length, digest };
            self.check_dense(&place, u32_at(record, 0), shard_offset)?;
            let is_header = shard_offset == 0 && self.files[file].kind == SHARD_FILE;
            if is_header && length <= 256 << 20 {
                self.check_digest(&place, &self.read(file, offset, length)?, "the shard's header")?;
            }
        }
        Ok(())
    }

    // ---- locating ----

    /// Find a family; without a name the main one of the layer, which is its first.
    fn find_family(&self, layer: u32, name: Option<&str>) -> Result<&Family> {
        let mut of_layer = self.families.iter().filter(|family| family.layer == layer);
        of_layer
            .find(|family| name.is_none_or(|name| family.name == name))
            .ok_or_else(|| format!("layer {layer} has no such experts"))
    }

    /// Locate the blob of an expert: None if its parts lie apart.
    fn locate_blob(&self, family: &Family, expert: u32) -> Result<Option<Place>> {
        check(expert < family.expert_count, || format!("there is no expert {expert}"))?;
        let n = family.first_blob + u64::from(expert);
        let record = self.record("blobs", n);
        let (offset, length) = (u64_at(record, 0), u64_at(record, 8));
        let (rank, file) = (u32_at(record, 24), u32_at(record, 28) as usize);
        check(u64::from(rank) < self.count("blobs"), || format!("blob {n}: no such rank"))?;
        if length == 0 {
            check(offset == 0 && file == 0, || format!("blob {n}: no length, yet a place"))?;
            return Ok(None);
        }
        let is_sound = file < self.files.len()
            && self.files[file].kind == DATA_FILE
            && is_inside(offset, length, self.files[file].length)
            && (offset | length) % self.blob_alignment == 0;
        check(is_sound, || format!("blob {n} breaks a rule"))?;
        Ok(Some(Place { file, offset, length, digest: None }))
    }

    /// Locate part number `p` of an expert.
    fn locate_part(&self, family: &Family, expert: u32, p: usize) -> Result<Place> {
        let blob = self.locate_blob(family, expert)?;
        let (kind, count) = (&family.kinds[p], family.kinds.len() as u64);
        let n = family.first_part + u64::from(expert) * count + p as u64;
        let record = self.record("parts", n);
        let (offset, length) = (u64_at(record, 0), u64_at(record, 8));
        let (file, codec) = (u32_at(record, 24) as usize, u32_at(record, 28));
        let is_sound = codec == 0
            && length == kind.length
            && file < self.files.len()
            && is_inside(offset, length, self.files[file].length);
        check(is_sound, || format!("part {n} ({}) breaks a rule", kind.name))?;
        let is_in_place = match blob {
            None => self.files[file].kind == SHARD_FILE,
            Some(blob) => {
                file == blob.file
                    && offset >= blob.offset
                    && is_inside(offset - blob.offset, length, blob.length)
            }
        };
        check(is_in_place, || format!("part {n} ({}) lies outside its blob", kind.name))?;
        let digest = self.files[file].has_digests.then_some(u64_at(record, 16));
        Ok(Place { file, offset, length, digest })
    }

    /// Find the expert with a rank: 0 is the hottest.
    fn at_rank(&self, rank: u64) -> Result<(&Family, u32)> {
        check(rank < self.count("ranks"), || format!("there is no rank {rank}"))?;
        let blob = u64::from(u32_at(self.record("ranks", rank), 0));
        check(blob < self.count("blobs"), || format!("rank {rank}: no such blob"))?;
        let after = self.families.partition_point(|family| family.first_blob <= blob);
        let family = &self.families[after - 1];
        Ok((family, (blob - family.first_blob) as u32))
    }

    fn tensor(&self, n: u64) -> Result<(&str, Place)> {
        let record = self.record("tensors", n);
        let name = text_at(record, 0, 256)?;
        name_at(record, 256, 24)?; // of the type
        let axes: Vec<u64> = (0..4).map(|axis| u64_at(record, 296 + 8 * axis)).collect();
        let (length, offset, file) =
            (u64_at(record, 328), u64_at(record, 336), u32_at(record, 292));
        let is_sound = u32_at(record, 284) <= 1
            && is_shape(&axes, u32_at(record, 288), true)
            && u64_at(record, 344) == length
            && u32_at(record, 364) == 0;
        check(is_sound, || format!("tensor {n} ({name}) breaks a rule"))?;
        let mut place = Place { file: file as usize, offset, length, digest: None };
        self.check_dense(&place, u32_at(record, 360), u64_at(record, 368))?;
        place.digest = self.files[place.file].has_digests.then_some(u64_at(record, 352));
        Ok((name, place))
    }

    /// The rules for the place of a tensor, or of shard bytes, in the pack and in the source.
    fn check_dense(&self, place: &Place, shard: u32, shard_offset: u64) -> Result<()> {
        let file = self.files.get(place.file).ok_or("a tensor lies in no file")?;
        let is_aligned = file.kind == SHARD_FILE || place.offset % self.tensor_alignment == 0;
        let is_sound = is_aligned
            && is_inside(place.offset, place.length, file.length)
            && shard < 4096
            && is_inside(shard_offset, place.length, MAX_LENGTH);
        check(is_sound, || format!("a tensor's place in {} breaks a rule", file.name))
    }

    // ---- reading ----

    /// Read bytes of a file. (For direct I/O open it with O_DIRECT, once, and read whole blobs into
    /// memory that is aligned as they are.)
    fn read(&self, file: usize, offset: u64, length: u64) -> Result<Vec<u8>> {
        let name = &self.files[file].name;
        let failed = |error| format!("{name}: {length} bytes at {offset}: {error}");
        let opened = File::open(self.folder.join(name)).map_err(failed)?;
        let end = opened.metadata().map_err(failed)?.len();
        check(is_inside(offset, length, end), || format!("{name}: cut short"))?;
        let mut bytes = vec![0; length as usize];
        opened.read_exact_at(&mut bytes, offset).map_err(failed)?;
        Ok(bytes)
    }

    fn check_digest(&self, place: &Place, bytes: &[u8], what: &str) -> Result<()> {
        let file = &self.files[place.file].name;
        let is_sound = place.digest.is_none_or(|digest| digest == xxh3(bytes));
        check(is_sound, || format!("{file}: {what} at {}: its digest differs", place.offset))
    }

    /// Read all parts of an expert, and compare them with their digests as far as these are known.
    fn read_expert(&self, family: &Family, expert: u32) -> Result<Vec<Vec<u8>>> {
        let blob = self.locate_blob(family, expert)?;
        let bytes = blob.as_ref().map(|blob| self.read(blob.file, blob.offset, blob.length));
        let bytes = bytes.transpose()?;
        let mut parts = Vec::new();
        for (p, kind) in family.kinds.iter().enumerate() {
            let place = self.locate_part(family, expert, p)?;
            let part = match (&blob, &bytes) {
                (Some(blob), Some(bytes)) => {
                    bytes[(place.offset - blob.offset) as usize..][..place.length as usize].to_vec()
                }
                _ => self.read(place.file, place.offset, place.length)?,
            };
            self.check_digest(&place, &part, &kind.name)?;
            parts.push(part);
        }
        Ok(parts)
    }
}

/// Read a regular file of up to `most` bytes.
fn read_file(path: &Path, most: u64) -> Result<Vec<u8>> {
    let failed = |error| format!("{}: {error}", path.display());
    let is_regular = fs::metadata(path).map_err(failed)?.is_file();
    check(is_regular, || format!("{}: not a regular file", path.display()))?;
    let mut bytes = Vec::new();
    File::open(path).map_err(failed)?.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    check(bytes.len() as u64 <= most, || format!("{}: too long", path.display()))?;
    Ok(bytes)
}

// ---- the manifest ----

/// Return the text at `index`, `name` of a manifest, after comparing its own digest.
fn index_name(manifest: &[u8]) -> Result<String> {
    let is_end = |end: &[u8]| end.starts_with(b",\n  \"manifest_digest\": \"xxh3:");
    let end = manifest.len().saturating_sub(49);
    let digest = manifest[end..].get(29..45).and_then(|hex| std::str::from_utf8(hex).ok());
    let digest = digest.and_then(|hex| u64::from_str_radix(hex, 16).ok());
    let is_sound = is_end(&manifest[end..]) && digest == Some(xxh3(&manifest[..end]));
    check(is_sound, || "manifest.json is damaged: its own digest differs".to_string())?;
    let name = Json { bytes: manifest, at: 0 }.value(&["index", "name"], 0)?;
    let name = name.ok_or("manifest.json: no name of an index")?;
    check(is_plain(&name), || format!("manifest.json: {name:?} is not a plain name"))?;
    Ok(name)
}

/// As much of a parser of JSON as finds one text.
struct Json<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Json<'_> {
    fn next(&mut self) -> Result<u8> {
        let byte = *self.bytes.get(self.at).ok_or("manifest.json ends too early")?;
        self.at += 1;
        Ok(byte)
    }

    /// Return the next byte that is not white space, without taking it.
    fn peek(&mut self) -> Result<u8> {
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.bytes.get(self.at).copied().ok_or_else(|| "manifest.json ends too early".to_string())
    }

    /// Take a value, and return the text at `path` in it.
    fn value(&mut self, path: &[&str], depth: u32) -> Result<Option<String>> {
        check(depth < 64, || "manifest.json: nested too deep".to_string())?;
        match self.peek()? {
            b'"' => self.text().map(|text| path.is_empty().then_some(text)),
            open @ (b'{' | b'[') => self.container(path, open, depth),
            _ => {
                let rest = self.bytes[self.at..].iter();
                self.at += rest.take_while(|byte| !b",]} \t\r\n".contains(byte)).count();
                Ok(None)
            }
        }
    }

    fn container(&mut self, path: &[&str], open: u8, depth: u32) -> Result<Option<String>> {
        let mut found = None;
        self.at += 1;
        while !b"]}".contains(&self.peek()?) {
            let mut inner: &[&str] = &["\0"]; // where nothing is
            if open == b'{' {
                let key = self.text()?;
                if path.first() == Some(&key.as_str()) {
                    inner = &path[1..];
                }
                check(self.peek()? == b':', || "manifest.json: no colon".to_string())?;
                self.at += 1;
            }
            found = self.value(inner, depth + 1)?.or(found);
            match self.peek()? {
                b',' => self.at += 1,
                byte => check(b"]}".contains(&byte), || "manifest.json: no comma".to_string())?,
            }
        }
        self.at += 1;
        Ok(found)
    }

    fn text(&mut self) -> Result<String> {
        check(self.peek()? == b'"', || "manifest.json: no text".to_string())?;
        self.at += 1;
        let mut text = Vec::new();
        loop {
            match self.next()? {
                b'"' => return String::from_utf8(text).map_err(|e| e.to_string()),
                b'\\' => match self.next()? {
                    b'u' => {
                        let hex = self.bytes.get(self.at..self.at + 4).unwrap_or_default();
                        let code = std::str::from_utf8(hex).ok();
                        let code = code.and_then(|hex| u32::from_str_radix(hex, 16).ok());
                        let letter = code.and_then(char::from_u32).unwrap_or('\u{fffd}');
                        text.extend(letter.to_string().bytes());
                        self.at += 4;
                    }
                    escaped => text.push(escaped), // no plain name has \n and the like
                },
                byte => text.push(byte),
            }
        }
    }
}

// ---- XXH3, 64 bits, seed 0: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md ----

const SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];
const P32: [u64; 3] = [0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D];
const P64: [u64; 5] = [
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
];
const MX_1: u64 = 0x165667919E3779F9;
const MX_2: u64 = 0x9FB21C651E98DF25;

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

fn avalanche(x: u64) -> u64 {
    let x = (x ^ x >> 37).wrapping_mul(MX_1);
    x ^ x >> 32
}

fn avalanche_64(x: u64) -> u64 {
    let x = (x ^ x >> 33).wrapping_mul(P64[1]);
    let x = (x ^ x >> 29).wrapping_mul(P64[2]);
    x ^ x >> 32
}

fn mix(bytes: &[u8], at: usize, secret: usize) -> u64 {
    fold(
        u64_at(bytes, at) ^ u64_at(&SECRET, secret),
        u64_at(bytes, at + 8) ^ u64_at(&SECRET, secret + 8),
    )
}

fn xxh3(bytes: &[u8]) -> u64 {
    let (n, length) = (bytes.len(), bytes.len() as u64);
    let secret = |at| u64_at(&SECRET, at);
    match n {
        0 => avalanche_64(secret(56) ^ secret(64)),
        1..=3 => {
            let [first, middle, last] = [bytes[0], bytes[n / 2], bytes[n - 1]].map(u64::from);
            let x = first << 16 | middle << 24 | last | length << 8;
            avalanche_64(x ^ u64::from(u32_at(&SECRET, 0) ^ u32_at(&SECRET, 4)))
        }
        4..=8 => {
            let x = u64::from(u32_at(bytes, n - 4)) | u64::from(u32_at(bytes, 0)) << 32;
            let x = x ^ secret(8) ^ secret(16);
            let x = (x ^ x.rotate_left(49) ^ x.rotate_left(24)).wrapping_mul(MX_2);
            let x = (x ^ (x >> 35).wrapping_add(length)).wrapping_mul(MX_2);
            x ^ x >> 28
        }
        9..=16 => {
            let x = secret(24) ^ secret(32) ^ u64_at(bytes, 0);
            let y = secret(40) ^ secret(48) ^ u64_at(bytes, n - 8);
            let sum = length.wrapping_add(x.swap_bytes()).wrapping_add(y);
            avalanche(sum.wrapping_add(fold(x, y)))
        }
        17..=128 => {
            let pairs = (0..=(n - 1) / 32).flat_map(|i| {
                [mix(bytes, 16 * i, 32 * i), mix(bytes, n - 16 * (i + 1), 32 * i + 16)]
            });
            avalanche(pairs.fold(length.wrapping_mul(P64[0]), u64::wrapping_add))
        }
        129..=240 => {
            let first = (0..8).map(|i| mix(bytes, 16 * i, 16 * i));
            let sum = avalanche(first.fold(length.wrapping_mul(P64[0]), u64::wrapping_add));
            let rest = (8..n / 16).map(|i| mix(bytes, 16 * i, 16 * (i - 8) + 3));
            let sum = rest.fold(sum, u64::wrapping_add);
            avalanche(sum.wrapping_add(mix(bytes, n - 16, 119)))
        }
        _ => xxh3_long(bytes),
    }
}

fn xxh3_long(bytes: &[u8]) -> u64 {
    let mut lanes = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]];
    let add = |lanes: &mut [u64; 8], at: usize, secret: usize| {
        for lane in 0..8 {
            let value = u64_at(bytes, at + 8 * lane);
            let keyed = value ^ u64_at(&SECRET, secret + 8 * lane);
            lanes[lane ^ 1] = lanes[lane ^ 1].wrapping_add(value);
            lanes[lane] = lanes[lane].wrapping_add((keyed & 0xffff_ffff) * (keyed >> 32));
        }
    };
    let stripes = (bytes.len() - 1) / 64;
    for stripe in 0..stripes {
        add(&mut lanes, 64 * stripe, 8 * (stripe % 16));
        if stripe % 16 == 15 {
            for (i, lane) in lanes.iter_mut().enumerate() {
                let keyed = *lane ^ *lane >> 47 ^ u64_at(&SECRET, 128 + 8 * i);
                *lane = keyed.wrapping_mul(P32[0]);
            }
        }
    }
    add(&mut lanes, bytes.len() - 64, 192 - 64 - 7);
    let pairs = (0..4).map(|i| {
        let secret = |at| u64_at(&SECRET, 11 + 16 * i + at);
        fold(lanes[2 * i] ^ secret(0), lanes[2 * i + 1] ^ secret(8))
    });
    let start = (bytes.len() as u64).wrapping_mul(P64[0]);
    avalanche(pairs.fold(start, u64::wrapping_add))
}

// ---- the program ----

fn number(text: &str) -> Result<u32> {
    text.parse().map_err(|_| format!("not a number: {text}"))
}

fn print_experts(pack: &Pack, layer: u32, experts: &[String]) -> Result<()> {
    let family = pack.find_family(layer, None)?;
    for text in experts {
        let expert = number(text)?;
        for (kind, bytes) in family.kinds.iter().zip(pack.read_expert(family, expert)?) {
            println!("layer {layer} expert {expert} {}: xxh3:{:016x}", kind.name, xxh3(&bytes));
        }
    }
    Ok(())
}

fn check_all(pack: &Pack) -> Result<()> {
    let mut parts = 0;
    for rank in 0..pack.count("ranks") {
        pack.at_rank(rank)?;
    }
    for family in &pack.families {
        for expert in 0..family.expert_count {
            parts += pack.read_expert(family, expert)?.len();
        }
    }
    let mut names = HashSet::new();
    for n in 0..pack.count("tensors") {
        let (name, place) = pack.tensor(n)?;
        check(names.insert(name), || format!("two tensors are called {name}"))?;
        pack.check_digest(&place, &pack.read(place.file, place.offset, place.length)?, name)?;
    }
    println!("readable: {} experts, {parts} parts, {} tensors", pack.count("blobs"), names.len());
    Ok(())
}

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match &arguments[..] {
        [path] => Pack::open(Path::new(path)).and_then(|pack| check_all(&pack)),
        [path, layer, experts @ ..] => Pack::open(Path::new(path))
            .and_then(|pack| print_experts(&pack, number(layer)?, experts)),
        [] => Err("usage: read_pack PACK [LAYER EXPERT...]".to_string()),
    };
    if let Err(problem) = done {
        eprintln!("{problem}");
        return std::process::ExitCode::FAILURE;
    }
    std::process::ExitCode::SUCCESS
}
