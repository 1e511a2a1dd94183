import { z } from 'zod';
import { hostArchitecture } from '../bubblewrap/seccomp.ts';
import { type ArchiveFiles, readSmall } from './archive-files.ts';
import { EMPTY_CONFIG, type ImageConfig, sha256 } from './record.ts';
import { refused } from './refused.ts';

/** A layer's place in the archive, and what it must turn out to be. */
export interface LayerBlob {
  path: string;
  /** Hexadecimal SHA-256 of the bytes as they lie there; null: only `diffId` is known. */
  sha256: string | null;
  bytes: number | null;
  /** Hexadecimal SHA-256 of the uncompressed tar. */
  diffId: string;
}

/** An image as its archive describes it, with nothing unpacked yet. */
export interface ArchivedImage {
  /** `sha256:` of its configuration: what `docker images --no-trunc` shows. */
  digest: string;
  platform: string;
  config: ImageConfig;
  history: string[];
  layers: LayerBlob[];
  /** Names that the archive gives it. */
  names: string[];
}

export interface ChooseOptions {
  /** Which one, where the archive holds several: its name as the archive has it. */
  reference?: string;
}

const MAX_LAYERS = 512;
const MAX_DEPTH = 4;
const REF_NAMES = ['io.containerd.image.name', 'org.opencontainers.image.ref.name'];
const DIGEST = z.string().regex(/^sha256:[0-9a-f]{64}$/, 'expected sha256: and 64 hex digits');

const Descriptor = z.object({
  mediaType: z.string(),
  digest: DIGEST,
  size: z.number().int().nonnegative(),
  platform: z
    .object({ os: z.string(), architecture: z.string(), variant: z.string().optional() })
    .optional(),
  annotations: z.record(z.string(), z.string()).nullish(),
});
type Descriptor = z.infer<typeof Descriptor>;

const Index = z.object({ manifests: z.array(Descriptor).max(10_000) });
const Manifest = z.object({ config: Descriptor, layers: z.array(Descriptor).max(MAX_LAYERS) });
const Text = z.string().max(1 << 20);
const Config = z.object({
  os: z.string(),
  architecture: z.string(),
  config: z
    .object({
      Env: z.array(Text).nullish(),
      WorkingDir: z.string().nullish(),
      User: z.string().nullish(),
      Entrypoint: z.array(Text).nullish(),
      Cmd: z.array(Text).nullish(),
      Labels: z.record(z.string(), z.string()).nullish(),
      ExposedPorts: z.record(z.string(), z.unknown()).nullish(),
    })
    .nullish(),
  rootfs: z.object({ type: z.literal('layers'), diff_ids: z.array(DIGEST).max(MAX_LAYERS) }),
  history: z.array(z.object({ created_by: z.string().nullish() })).nullish(),
});
const DockerManifest = z.array(
  z.object({
    Config: z.string(),
    RepoTags: z.array(z.string()).nullish(),
    Layers: z.array(z.string()).max(MAX_LAYERS),
  }),
);

const hex = (digest: string) => digest.slice('sha256:'.length);
const blobPath = (digest: string) => `blobs/sha256/${hex(digest)}`;

/** JSON of hostile origin, checked. */
function parsed<T>(schema: z.ZodType<T>, bytes: Buffer, what: string): T {
  let value: unknown;
  try {
    value = JSON.parse(bytes.toString('utf8'));
  } catch {
    throw refused(what, 'not readable as JSON');
  }
  const result = schema.safeParse(value);
  if (result.success) return result.data;
  const issue = result.error.issues[0]!;
  throw refused(what, `${issue.path.join('.') || 'content'}: ${issue.message}`);
}

async function blob(files: ArchiveFiles, { digest, size }: Descriptor): Promise<Buffer> {
  const bytes = await readSmall(files, blobPath(digest));
  if (bytes.length !== size || sha256(bytes) !== hex(digest))
    throw refused(digest, 'its content has another size or checksum');
  return bytes;
}

/**
 * Reads the description of an OCI layout (image-spec v1) or of what `docker save` writes.
 * `FileRefused` for what is neither, and where no image for this machine or of that name is in it.
 */
export async function readArchive(
  files: ArchiveFiles,
  options: ChooseOptions = {},
): Promise<ArchivedImage> {
  if ((await files.size('index.json')) !== null) return readLayout(files, options);
  if ((await files.size('manifest.json')) !== null) return readDocker(files, options);
  throw refused('archive', 'it has neither index.json (OCI) nor manifest.json (docker save)');
}

async function readLayout(files: ArchiveFiles, options: ChooseOptions): Promise<ArchivedImage> {
  const layout = z.object({ imageLayoutVersion: z.string().startsWith('1.') });
  parsed(layout, await readSmall(files, 'oci-layout'), 'oci-layout');
  const top = parsed(Index, await readSmall(files, 'index.json'), 'index.json');
  const namesOf = (entry: Descriptor) => REF_NAMES.flatMap((key) => entry.annotations?.[key] ?? []);
  const wanted = top.manifests.filter(
    (entry) => options.reference === undefined || namesOf(entry).includes(options.reference),
  );
  if (wanted.length === 0)
    throw refused(
      options.reference ?? 'index.json',
      `not in the archive, which has ${top.manifests.flatMap(namesOf).slice(0, 20).join(', ') || 'no named image'}`,
      'Name one of those.',
    );
  const found: { descriptor: Descriptor; names: string[] }[] = [];
  const others: string[] = [];
  const search = async (entries: Descriptor[], names: string[], depth: number) => {
    if (depth > MAX_DEPTH) throw refused('index.json', 'indexes are nested too deep');
    for (const entry of entries) {
      const own = [...names, ...namesOf(entry)];
      if (/index|manifest\.list/.test(entry.mediaType)) {
        const inner = parsed(Index, await blob(files, entry), entry.digest);
        await search(inner.manifests, own, depth + 1);
      } else if (!entry.platform || runsHere(entry.platform)) {
        found.push({ descriptor: entry, names: own });
      } else {
        others.push(`${entry.platform.os}/${entry.platform.architecture}`);
      }
    }
  };
  await search(wanted, [], 0);
  const images = new Map(found.map((each) => [each.descriptor.digest, each]));
  if (images.size === 0)
    throw refused('index.json', `no image for ${hostPlatform()}; it has ${others.join(', ')}`);
  if (images.size > 1)
    throw refused(
      'index.json',
      `it holds ${images.size} images: ${found.flatMap((each) => each.names).join(', ')}`,
      'Say which with `reference`.',
    );
  const [{ descriptor, names }] = [...images.values()] as [(typeof found)[0]];
  const manifest = parsed(Manifest, await blob(files, descriptor), descriptor.digest);
  const config = parsed(Config, await blob(files, manifest.config), manifest.config.digest);
  if (config.rootfs.diff_ids.length !== manifest.layers.length)
    throw refused(descriptor.digest, 'configuration and manifest name different layers');
  const layers = manifest.layers.map((layer, index) => {
    if (!/\.tar($|[.+](gzip|zstd)$)/.test(layer.mediaType))
      throw refused(layer.digest, `layers of kind ${layer.mediaType.slice(0, 80)} cannot be read`);
    return {
      path: blobPath(layer.digest),
      sha256: hex(layer.digest),
      bytes: layer.size,
      diffId: hex(config.rootfs.diff_ids[index]!),
    };
  });
  return described(config, manifest.config.digest, layers, names);
}

async function readDocker(files: ArchiveFiles, options: ChooseOptions): Promise<ArchivedImage> {
  const all = parsed(DockerManifest, await readSmall(files, 'manifest.json'), 'manifest.json');
  const { reference } = options;
  const wanted = all.filter((entry) => !reference || entry.RepoTags?.includes(reference));
  if (wanted.length !== 1)
    throw refused(
      'manifest.json',
      `${wanted.length} images${reference ? ` of the name ${reference}` : ''}; it has ${all.flatMap((entry) => entry.RepoTags ?? []).join(', ') || 'no names'}`,
      'Say which with `reference`.',
    );
  const [entry] = wanted as [(typeof all)[0]];
  const bytes = await readSmall(files, entry.Config);
  const digest = sha256(bytes);
  const named = /([0-9a-f]{64})(\.json)?$/.exec(entry.Config)?.[1];
  if (named !== digest) throw refused(entry.Config, 'its content has another checksum');
  const config = parsed(Config, bytes, entry.Config);
  if (config.rootfs.diff_ids.length !== entry.Layers.length)
    throw refused(entry.Config, 'configuration and manifest name different layers');
  const layers = entry.Layers.map((path, index) => ({
    path,
    sha256: null,
    bytes: null,
    diffId: hex(config.rootfs.diff_ids[index]!),
  }));
  return described(config, `sha256:${digest}`, layers, entry.RepoTags ?? []);
}

function described(
  image: z.infer<typeof Config>,
  digest: string,
  layers: LayerBlob[],
  names: string[],
): ArchivedImage {
  if (!runsHere(image))
    throw refused(
      digest,
      `it is for ${image.os}/${image.architecture}, not for ${hostPlatform()}`,
      `Save the variant for this machine: \`docker pull --platform ${hostPlatform()} …\`.`,
    );
  const { config } = image;
  return {
    digest,
    platform: `${image.os}/${image.architecture}`,
    config: {
      ...EMPTY_CONFIG,
      env: environment(config?.Env ?? [], digest),
      workdir: config?.WorkingDir || null,
      user: config?.User || null,
      entrypoint: config?.Entrypoint ?? null,
      cmd: config?.Cmd ?? null,
      labels: config?.Labels ?? {},
      exposed: Object.keys(config?.ExposedPorts ?? {}),
    },
    history: (image.history ?? []).flatMap((step) => step.created_by ?? []),
    layers,
    names,
  };
}

/** `NAME=VALUE` as execve takes it. A NUL would cut a value short there. */
function environment(lines: readonly string[], what: string): Record<string, string> {
  return Object.fromEntries(
    lines.map((line) => {
      const equals = line.indexOf('=');
      if (equals < 1 || line.includes('\0'))
        throw refused(what, `${JSON.stringify(line.slice(0, 80))} is no environment variable`);
      return [line.slice(0, equals), line.slice(equals + 1)];
    }),
  );
}

/** The architecture as Go and so OCI names it. */
const ARCHITECTURES: Record<string, string> = { x64: 'amd64', arm64: 'arm64' };

export function hostPlatform(): string {
  return `linux/${ARCHITECTURES[hostArchitecture() ?? ''] ?? process.arch}`;
}

function runsHere(platform: { os: string; architecture: string }): boolean {
  return `${platform.os}/${platform.architecture}` === hostPlatform();
}
