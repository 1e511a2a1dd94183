export type { ImageConfig, ImageRecord } from './record.ts';
export {
  type AddOptions,
  type BuildOptions,
  type BuildResult,
  ImageStore,
  type ImageStoreOptions,
  type StoredImage,
} from './store.ts';
