//! Objects under one address: an S3 bucket, or a folder.

use crate::checkpoint::manifest::{BufferFile, FileEntry, MANIFEST, MAX_MANIFEST_BYTES, Manifest};
use crate::error::{CheckpointError, Error, Result};
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{Error as StoreError, ObjectStore, ObjectStoreExt, WriteMultipart};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The minimum size in bytes of a part of an upload. S3-compatible stores require at least 5 MiB.
const MIN_PART_BYTES: u64 = 8 << 20;

/// The maximum number of parts of an upload. S3 allows 10,000.
const MAX_PARTS: u64 = 9_000;

/// The number of parts in flight at a time.
const PARTS_IN_FLIGHT: usize = 4;

/// The objects under one address.
pub(super) struct ObjectBucket {
    store: Arc<dyn ObjectStore>,
    prefix: Key,
    url: String,
}

/// Checks that `url` is a valid address and that its settings are right, as [`ObjectBucket::open`] does.
///
/// # Errors
/// Fails with a [`CheckpointError::Store`] that describes the problem.
pub(crate) fn check(url: &str) -> Result<()> {
    ObjectBucket::open(url).map(drop)
}

/// Runs a future on this thread, which must not belong to another runtime.
pub(super) fn block_on<T>(url: &str, work: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| store_error(url, format!("cannot create a runtime for it: {e}")))?;
    runtime.block_on(work())
}

/// Runs a future on a separate thread, for a caller that may be in a runtime.
pub(super) fn run<T: Send>(url: &str, work: impl AsyncFnOnce() -> Result<T> + Send) -> Result<T> {
    let run = || block_on(url, work);
    std::thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Returns an error about the store as a whole.
pub(super) fn store_error(url: &str, problem: String) -> Error {
    CheckpointError::Store { url: url.to_owned(), problem }.into()
}

/// Returns the object name of a rank's file.
pub(super) fn rank_object(file: &FileEntry) -> String {
    with_checksum(&file.name, &file.header_checksum)
}

/// Returns the object name of the buffer file.
pub(super) fn buffers_object(file: &BufferFile) -> String {
    with_checksum(&file.name, &file.checksum)
}

fn with_checksum(name: &str, checksum: &str) -> String {
    match name.strip_suffix(".safetensors") {
        Some(stem) => format!("{stem}-{checksum}.safetensors"),
        None => format!("{name}-{checksum}"),
    }
}

/// Returns the names and lengths of a checkpoint's objects, without its manifest.
pub(super) fn objects(manifest: &Manifest) -> impl Iterator<Item = (String, u64)> + '_ {
    let ranks = manifest.files.iter().map(|file| (rank_object(file), file.bytes));
    ranks.chain(manifest.buffers.iter().map(|file| (buffers_object(file), file.bytes)))
}

impl ObjectBucket {
    /// Opens `s3://BUCKET/PREFIX`, with settings from the environment (`AWS_...`), or `file:///FOLDER`, which is
    /// created.
    ///
    /// # Errors
    /// Fails with [`CheckpointError::Store`] for an invalid address, wrong settings, or a folder that cannot be
    /// created.
    pub fn open(url: &str) -> Result<Self> {
        let invalid_address = || {
            store_error(
                url,
                "it is not the address of an object store; give s3://BUCKET/PREFIX, or file:///FOLDER".into(),
            )
        };
        let settings = |e: StoreError| store_error(url, format!("{e}; correct the environment variables AWS_..."));
        if let Some(folder) = url.strip_prefix("file://") {
            if !folder.starts_with('/') {
                return Err(invalid_address());
            }
            std::fs::create_dir_all(folder)
                .map_err(|e| store_error(url, format!("{e}; give a folder that can be created")))?;
            let store = LocalFileSystem::new_with_prefix(folder).map_err(settings)?;
            return Ok(Self::new(Arc::new(store.with_fsync(true)), Key::default(), url));
        }
        let rest = url.strip_prefix("s3://").ok_or_else(invalid_address)?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(invalid_address());
        }
        let prefix = Key::parse(prefix).map_err(|_| invalid_address())?;
        // rustls requires a process-wide default provider; another part of the program may already have installed one.
        _ = rustls::crypto::ring::default_provider().install_default();
        let endpoint = ["AWS_ENDPOINT_URL", "AWS_ENDPOINT"].into_iter().find_map(|name| std::env::var(name).ok());
        let is_plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
        let builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
        let builder = if is_plain { builder.with_allow_http(true) } else { builder };
        Ok(Self::new(Arc::new(builder.build().map_err(settings)?), prefix, url))
    }

    pub fn new(store: Arc<dyn ObjectStore>, prefix: Key, url: &str) -> Self {
        Self { store, prefix, url: url.to_owned() }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the key of an object from its path components.
    fn key(&self, names: &[&str]) -> Key {
        names.iter().fold(self.prefix.clone(), |key, name| key.join(*name))
    }

    /// Returns the error for a failed action on an object.
    pub fn object_error(&self, action: &str, names: &[&str], why: &dyn std::fmt::Display) -> Error {
        let key = self.key(names);
        store_error(&self.url, format!("{action} {key}: {why}"))
    }

    fn request_error(&self, action: &str, names: &[&str], why: &StoreError) -> Error {
        let fix = match why {
            StoreError::NotFound { .. } => "check that the bucket exists, or correct the address",
            StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => {
                "check that AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY grant this permission"
            }
            _ => "check that the store is reachable (AWS_ENDPOINT_URL, AWS_REGION)",
        };
        self.object_error(action, names, &format!("{why}; {fix}"))
    }

    /// Writes a small object.
    pub async fn put(&self, names: &[&str], bytes: Vec<u8>) -> Result<()> {
        let put = self.store.put(&self.key(names), bytes.into()).await;
        put.map(drop).map_err(|e| self.request_error("cannot write", names, &e))
    }

    /// Writes the file at `path`, which has `bytes` bytes. The object appears only once it is complete. Returns an
    /// error if `stop` is set before all bytes are sent. `on_progress` is called with the number of bytes sent so far.
    pub async fn put_file(
        &self,
        names: &[&str],
        (path, bytes): (&Path, u64),
        stop: &AtomicBool,
        mut on_progress: impl FnMut(u64),
    ) -> Result<()> {
        let part = MIN_PART_BYTES.max(bytes.div_ceil(MAX_PARTS));
        let upload = self.store.put_multipart(&self.key(names)).await;
        let upload = upload.map_err(|e| self.request_error("cannot write", names, &e))?;
        let mut upload = WriteMultipart::new_with_chunk_size(upload, part as usize);
        let read = |e: std::io::Error| self.object_error("cannot send", names, &format!("{}: {e}", path.display()));
        let parts = async {
            let mut file = File::open(path).map_err(read)?;
            let mut buffer = vec![0; part.min(bytes) as usize];
            let mut sent = 0;
            while sent < bytes {
                if stop.load(Ordering::Relaxed) {
                    return Err(self.object_error("stopped writing", names, &"another rank failed"));
                }
                let chunk = &mut buffer[..(bytes - sent).min(part) as usize];
                file.read_exact(chunk).map_err(read)?;
                let ready = upload.wait_for_capacity(PARTS_IN_FLIGHT).await;
                ready.map_err(|e| self.request_error("cannot write", names, &e))?;
                upload.write(chunk);
                sent += chunk.len() as u64;
                on_progress(sent);
            }
            Ok(())
        };
        match parts.await {
            Ok(()) => upload.finish().await.map(drop).map_err(|e| self.request_error("cannot write", names, &e)),
            Err(error) => {
                // Parts that were sent do not form an object.
                _ = upload.abort().await;
                Err(error)
            }
        }
    }

    /// Returns an object of at most `limit` bytes; `None` if it does not exist.
    pub async fn get(&self, names: &[&str], limit: u64) -> Result<Option<Vec<u8>>> {
        let request_error = |e: StoreError| self.request_error("cannot read", names, &e);
        let response = match self.store.get(&self.key(names)).await {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            response => response.map_err(request_error)?,
        };
        let bytes = response.meta.size;
        if bytes > limit {
            return Err(self.object_error(
                "cannot read",
                names,
                &format!("it has {bytes} bytes, but only {limit} are read"),
            ));
        }
        Ok(Some(response.bytes().await.map_err(request_error)?.to_vec()))
    }

    /// Reads an object of `bytes` bytes into `file`. `on_progress` is called with the number of bytes read so far.
    pub async fn get_file(
        &self,
        names: &[&str],
        file: &File,
        bytes: u64,
        mut on_progress: impl FnMut(u64),
    ) -> Result<()> {
        let mut at = 0;
        while at < bytes {
            let part = self.store.get_range(&self.key(names), at..bytes.min(at + 2 * MIN_PART_BYTES)).await;
            let part = part.map_err(|e| self.request_error("cannot read", names, &e))?;
            if part.is_empty() {
                return Err(self.object_error("cannot read", names, &format!("it ends after {at} of {bytes} bytes")));
            }
            file.write_all_at(&part, at).map_err(|e| self.object_error("cannot save", names, &e))?;
            at += part.len() as u64;
            on_progress(at);
        }
        Ok(())
    }

    /// Returns the tags under the address, complete or not.
    pub async fn tags(&self) -> Result<Vec<String>> {
        let list = self.store.list_with_delimiter(Some(&self.prefix)).await;
        let list = list.map_err(|e| self.request_error("cannot list", &[], &e))?;
        Ok(list.common_prefixes.iter().filter_map(|key| key.filename().map(str::to_owned)).collect())
    }

    /// Returns the names and lengths of a tag's objects.
    pub async fn sizes(&self, tag: &str) -> Result<BTreeMap<String, u64>> {
        let list = self.store.list_with_delimiter(Some(&self.key(&[tag]))).await;
        let list = list.map_err(|e| self.request_error("cannot list", &[tag], &e))?;
        let entry = |object: &object_store::ObjectMeta| Some((object.location.filename()?.to_owned(), object.size));
        Ok(list.objects.iter().filter_map(entry).collect())
    }

    /// Returns the manifest of a tag, if it exists.
    pub async fn manifest(&self, tag: &str) -> Result<Option<Manifest>> {
        let names = [tag, MANIFEST];
        let Some(bytes) = self.get(&names, MAX_MANIFEST_BYTES).await? else { return Ok(None) };
        let parsed = Manifest::parse(&String::from_utf8_lossy(&bytes));
        parsed.map(Some).map_err(|problem| self.object_error("cannot use", &names, &problem))
    }

    /// Removes an object and ignores errors.
    pub async fn remove(&self, names: &[&str]) {
        _ = self.store.delete(&self.key(names)).await;
    }
}
